"""Keys and values of many sequences in pages of one size, and causal attention to them.

A page holds ``page_size`` tokens of one sequence, with the heads of this rank: ``(page_size, kv_heads,
head_dim)``.  A row of the page table names the pages of one sequence, in the order of its tokens.  Queries of
all sequences lie packed, one sequence after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write the keys and values of tokens to their slots.

    Args:
        keys: (tokens, kv_heads, head_dim).
        values: (tokens, kv_heads, head_dim of values).
        key_pages: (pages, page_size, kv_heads, head_dim), which is changed.
        value_pages: like ``key_pages``.
        slots: for each token ``page * page_size + offset`` in int64, or -1 for one that is not kept.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        keys, values, slots = keys[kept], values[kept], slots[kept]
    key_pages.view(-1, *key_pages.shape[2:])[slots] = keys.to(key_pages.dtype)
    value_pages.view(-1, *value_pages.shape[2:])[slots] = values.to(value_pages.dtype)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    max_query: int,
    scale: float,
    alibi: Tensor | None = None,
    window: int | None = None,
    exact: bool = False,
) -> Tensor:
    """The causal attention of packed queries to the keys in the pages of their sequences.

    Args:
        query: (tokens, heads, head_dim), sequence after sequence.
        page_table: (sequences, most pages of one) in int32.
        query_starts: (sequences + 1,) in int32, where the queries of each sequence begin, and the end.
        lengths: (sequences,) in int32, the keys of each sequence, of which the last ones are the queries'
            own.
        max_query: the most queries of one sequence.
        alibi: (heads,), what a head adds to a score for every position of the key.
        window: how many keys back a query sees, with its own; None for all.
        exact: whether a result must not depend on the other sequences, bit for bit.

    Returns:
        (tokens, heads, head_dim of values) in the dtype of ``query``; 0 for queries that see no key.
    """
    del max_query, exact  # one sequence is computed at a time
    out = query.new_zeros(*query.shape[:2], value_pages.shape[-1])
    starts, sizes, page_size = query_starts.tolist(), lengths.tolist(), key_pages.shape[1]
    for row, length in enumerate(sizes):
        begin, end = starts[row], starts[row + 1]
        if end == begin or length == 0:
            continue
        pages = page_table[row, : -(-length // page_size)].long()
        key, value = (
            p[pages].flatten(0, 1)[:length].to(query.dtype).transpose(0, 1) for p in (key_pages, value_pages)
        )
        mask = _mask(end - begin, length, query, alibi, window)
        found = scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=key.shape[0] != query.shape[1],
        )
        out[begin:end] = found[0].transpose(0, 1)
    return out


def _mask(
    queries: int, length: int, query: Tensor, alibi: Tensor | None, window: int | None
) -> Tensor | None:
    """What is added to the scores of the last ``queries`` of ``length`` tokens; None for nothing."""
    if queries == 1 and alibi is None and window is None:
        return None
    places = torch.arange(length, device=query.device)
    back = places[length - queries :, None] - places  # (queries, keys)
    hidden = back < 0
    if window is not None:
        hidden |= back >= window
    if alibi is None:
        return ~hidden
    bias = (alibi[:, None, None] * places).to(query.dtype)  # (heads, 1, keys)
    return bias.expand(-1, queries, -1).masked_fill(hidden, float("-inf"))
