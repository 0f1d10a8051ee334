"""The Triton kernels of ``paged_attention``.

A program has the queries of one sequence and one head of keys: rows of a tile are pairs of a query and one
of the heads that share the keys, so that keys are loaded once for all of them.  Where each sequence has one
query, programs share its keys in ``splits`` parts, whose results are merged by their log-sum-exps.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.triton_early import early

LOG2E = 1.4426950408889634
PROGRAMS = 1024  # that keep the memory of a large GPU busy
LEAST_KEYS = 512  # of a split
MOST_SPLITS = 16


@triton.jit
def _write_pages(
    keys, values, key_pages, value_pages, slots, key_row, value_row, key_width, value_width,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    of_key = column < tl.where(slot >= 0, key_width, 0)
    of_value = column < tl.where(slot >= 0, value_width, 0)
    key = tl.load(keys + token * key_row + column, mask=of_key)
    value = tl.load(values + token * value_row + column, mask=of_value)
    tl.store(key_pages + slot * key_width + column, key, mask=of_key)
    tl.store(value_pages + slot * value_width + column, value, mask=of_value)


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    tokens = keys.size(0)
    if not tokens:
        return
    keys, values = (_flat(t) for t in (keys, values))
    widest = max(keys.size(1), values.size(1))
    block = min(2048, triton.next_power_of_2(widest))
    with on_device_of(keys):
        _write_pages[(tokens, triton.cdiv(widest, block))](
            keys,
            values,
            key_pages,
            value_pages,
            slots,
            keys.stride(0),
            values.stride(0),
            keys.size(1),
            values.size(1),
            BLOCK=block,
            EARLY=early(keys.device),
            launch_pdl=early(keys.device),
        )


def _flat(heads: Tensor) -> Tensor:
    """A row of numbers that lie side by side for each token, of all ``heads`` (tokens, heads, width)."""
    rows = heads.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def _attend(
    query, key_pages, value_pages, table, starts, lengths, out, sums, slopes, table_row, page_size, qt, qh,
    kt, kh, vt, vh, heads, width, value_width, scale, window, splits, mask, ms, mh, mq, mk,
    MASKED: tl.constexpr, ORDER: tl.constexpr, SHARED: tl.constexpr, ALIBI: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    IEEE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, shared_head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + batch)
    begin = tl.load(starts + batch)
    queries = tl.load(starts + batch + 1) - begin
    first, last = 0, length
    tile = tl.program_id(0)
    if SPLIT:
        tile = 0
        share = tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS
        first = tl.program_id(0) * share
        last = tl.minimum(first + share, length)
    if tile * ROWS >= queries * SHARED:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    number, head = row // SHARED, shared_head * SHARED + row % SHARED
    exists = number < queries
    position = number  # of queries that are the first of their sequence
    if ORDER == 0:  # all keys are seen
        position = tl.full((ROWS,), 0, tl.int32) + (length - 1)
    elif ORDER == 1:  # queries are the last
        position = length - queries + number
    column, value_column = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    narrow, narrow_value = column < width, value_column < value_width
    of_query = (begin + number).to(tl.int64) * qt + head * qh
    q = tl.load(
        query + of_query[:, None] + column[None, :], mask=exists[:, None] & narrow[None, :], other=0.0
    )
    if ALIBI:
        slope = tl.load(slopes + head, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634
    first = tl.maximum(first, tl.maximum(tl.min(position, 0) - window + 1, 0) // KEYS * KEYS)
    last = tl.minimum(last, tl.max(tl.where(exists, position, 0), 0) + 1)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)
        inside = place < length
        page = tl.load(table + batch * table_row + place // page_size, mask=inside, other=0).to(tl.int64)
        slot = page * page_size + place % page_size
        key = tl.load(
            key_pages + (slot * kt + shared_head * kh)[:, None] + column[None, :],
            mask=inside[:, None] & narrow[None, :],
            other=0.0,
        )
        value = tl.load(
            value_pages + (slot * vt + shared_head * vh)[:, None] + value_column[None, :],
            mask=inside[:, None] & narrow_value[None, :],
            other=0.0,
        )
        if IEEE:
            score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(key)) * scale
        behind = position[:, None] - place[None, :]
        if MASKED:
            of_row = batch * ms + head.to(tl.int64) * mh + number.to(tl.int64) * mq
            of_mask = of_row[:, None] + place[None, :] * mk
            score += (
                tl.load(mask + of_mask, mask=exists[:, None] & inside[None, :], other=0.0)
                * 1.4426950408889634
            )
        if ALIBI:
            score -= slope[:, None] * behind.to(tl.float32)
        seen = (behind >= 0) & (behind < window) & (place < last)[None, :]
        if MASKED:
            seen = seen & (score > -1e30)
        score = tl.where(seen, score, -1e30)
        new = tl.maximum(top, tl.max(score, 1))
        old_share = tl.exp2(top - new)
        p = tl.where(seen, tl.exp2(score - new[:, None]), 0.0)
        total = total * old_share + tl.sum(p, 1)
        result = result * old_share[:, None]
        if IEEE:
            result = tl.dot(p, value, result, input_precision="ieee")
        else:
            result = tl.dot(p.to(value.dtype), value, result)
        top = new
    answer = result / tl.where(total > 0, total, 1.0)[:, None]
    at = (begin + number).to(tl.int64) * heads + head
    if SPLIT:
        at = at * splits + tl.program_id(0)
        tl.store(sums + at, tl.where(total > 0, top + tl.log2(total), -1e30), mask=exists)
    tl.store(
        out + at[:, None] * value_width + value_column[None, :],
        answer,
        mask=exists[:, None] & narrow_value[None, :],
    )


@triton.jit
def _merge(
    parts, sums, out, splits, width, SPLITS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    lse = tl.load(sums + row * splits + split, mask=split < splits, other=-1e30)
    at = (row * splits + split)[:, None] * width + column[None, :]
    part = tl.load(parts + at, mask=(split < splits)[:, None] & (column < width)[None, :], other=0.0)
    top = tl.max(lse, 0)
    weight = tl.where(lse > -1e29, tl.exp2(lse - top), 0.0)
    total = tl.sum(weight, 0)
    answer = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * width + column, answer, mask=column < width)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    alibi: Tensor | None,
    window: int | None,
    exact: bool,
    mask: Tensor | None = None,
    order: int = 1,
) -> Tensor:
    """``mask`` (sequences, heads, queries, keys) in float32 is added to scores; ``order`` is 0 if all keys
    are seen, 1 if queries are the last of their sequences, 2 if they are the first.
    """
    tokens, heads, width = query.shape
    shared_heads, page_size, value_width = key_pages.size(2), key_pages.size(1), value_pages.size(3)
    out = torch.empty(tokens, heads, value_width, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    shared, batch = heads // shared_heads, lengths.numel()
    padded, value_padded = (max(16, triton.next_power_of_2(n)) for n in (width, value_width))  # of tl.dot
    full = query.dtype == torch.float32
    rows, keys, warps, stages = _tiles(max_query * shared, max(padded, value_padded), full, exact)
    single = max_query == 1 and tokens == batch and shared <= rows and not exact
    splits = number_of_splits(batch * shared_heads, page_table.size(1) * page_size) if single else 1
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty(tokens, heads, splits, value_width, dtype=torch.float32, device=query.device)
        sums = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query.device)
    strides = *query.stride()[:2], *key_pages.stride()[1:3], *value_pages.stride()[1:3]
    slopes = query if alibi is None else alibi.contiguous()  # a column of what the model adds to scores
    far = 1 << 30 if window is None else window
    soon = early(query.device)
    with on_device_of(query):
        tiles = splits if splits > 1 else triton.cdiv(max_query * shared, rows)
        _attend[(tiles, shared_heads, batch)](
            query, key_pages, value_pages, page_table, query_starts, lengths, parts, sums, slopes,
            page_table.stride(0), page_size, *strides, heads, width, value_width, scale * LOG2E, far, splits,
            query if mask is None else mask,
            *((0, 0, 0, 0) if mask is None else mask.stride()), MASKED=mask is not None, ORDER=order,
            SHARED=shared, ALIBI=alibi is not None, SPLIT=splits > 1, ROWS=rows, KEYS=keys, WIDTH=padded,
            VALUE_WIDTH=value_padded, IEEE=full, STAGES=stages, num_warps=warps, EARLY=soon, launch_pdl=soon,
        )  # fmt: skip
        if splits > 1:
            _merge[(tokens * heads,)](
                parts,
                sums,
                out,
                splits,
                value_width,
                SPLITS=triton.next_power_of_2(splits),
                WIDTH=value_padded,
                EARLY=soon,
                num_warps=2,
                launch_pdl=soon,
            )
    return out


def number_of_splits(groups: int, keys: int) -> int:
    """In how many parts the keys of a sequence are read, where programs for all of its heads in all
    sequences are ``groups``.
    """
    wanted = min(PROGRAMS // groups, keys // LEAST_KEYS, MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def _tiles(rows: int, width: int, full: bool, exact: bool) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps, and stages in which keys are loaded.

    Exact results want one order of sums, so one tile: a row must not depend on the others' number.
    """
    if exact or rows <= 16 or full:
        return 16, 16 if full and width > 128 else 32 if width > 128 or full else 64, 4, 2
    if rows <= 64 or width > 128:
        return 64, 32 if width > 128 else 64, 4, 2
    return 128, 64, 8, 3 if width <= 64 else 2


def on_device_of(tensor: Tensor):
    return torch.cuda.device(tensor.device)
