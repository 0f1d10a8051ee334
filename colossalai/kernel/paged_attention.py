"""Keys and values of many sequences in pages of one size, and causal attention to them.

A page holds ``page_size`` tokens of one sequence, with the heads of this rank: ``(page_size, kv_heads,
head_dim)``.  A row of the page table names the pages of one sequence, in the order of its tokens.  Queries of
all sequences lie packed, one sequence after the other.

Both functions are operators of torch: Triton's kernels on a GPU, plain PyTorch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from colossalai.kernel.probe import triton_works


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write the keys and values of tokens to their slots.

    Args:
        keys: (tokens, kv_heads, head_dim).
        values: (tokens, kv_heads, head_dim of values).
        key_pages: (pages, page_size, kv_heads, head_dim), which is changed.
        value_pages: like ``key_pages``.
        slots: for each token ``page * page_size + offset`` in int64, or -1 for one that is not kept.
    """
    torch.ops.colossalai.write_pages(keys, values, key_pages, value_pages, slots)


def _write(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    if _on_gpu(keys, values):
        from colossalai.kernel import triton_paged_attention

        triton_paged_attention.write_pages(keys, values, key_pages, value_pages, slots)
        return
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
    found: Tensor = torch.ops.colossalai.paged_attention(
        query,
        key_pages,
        value_pages,
        page_table,
        query_starts,
        lengths,
        max_query,
        scale,
        alibi,
        0 if window is None else window,
        exact,
    )
    return found


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    alibi: Tensor | None,
    window: int,
    exact: bool,
) -> Tensor:
    args = query, key_pages, value_pages, page_table, query_starts, lengths
    seen = window or None
    if _on_gpu(query, value_pages):
        from colossalai.kernel import triton_paged_attention

        return triton_paged_attention.paged_attention(*args, max_query, scale, alibi, seen, exact)
    if exact:
        from colossalai.kernel.exact import attention_to_pages

        return attention_to_pages(
            query,
            (key_pages, value_pages),
            page_table,
            query_starts,
            lengths,
            scale=scale,
            slopes=alibi,
            window=seen,
        )
    return plain_attention(*args, scale=scale, alibi=alibi, window=seen)


def _on_gpu(*tensors: Tensor) -> bool:
    known = (torch.bfloat16, torch.float16, torch.float32)
    return tensors[0].is_cuda and all(t.dtype in known for t in tensors) and triton_works()


def plain_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    alibi: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """``paged_attention`` by torch's attention, one sequence after the other."""
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


# defined by hand: `custom_op` imports torch's compiler when it is first called
_operators = torch.library.Library("colossalai", "FRAGMENT")
_operators.define(
    "write_pages(Tensor keys, Tensor values, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slots)"
    " -> ()"
)
_operators.define(
    "paged_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table,"
    " Tensor query_starts, Tensor lengths, int max_query, float scale, Tensor? alibi, int window, bool exact)"
    " -> Tensor"
)
for _key in ("CPU", "CUDA"):
    _operators.impl("write_pages", _write, _key)
    _operators.impl("paged_attention", _attend, _key)
_operators.impl("write_pages", lambda *_: None, "Meta")
_operators.impl(
    "paged_attention",
    lambda query, _, value_pages, *__: query.new_empty(*query.shape[:2], value_pages.shape[-1]),
    "Meta",
)
