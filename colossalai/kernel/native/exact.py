"""Products and attention on the host whose results do not depend on the other rows, bit for bit."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch
from torch import Tensor

import colossalai.kernel.native.build as build

SMALL = 1 << 17  # multiplications that are not worth another thread


class _Fields(ctypes.Structure):
    """A structure of C that is filled by name; tensors are passed by their addresses."""

    def __init__(self, **values: object) -> None:
        assert values.keys() == {name for name, *_ in self._fields_}
        super().__init__(**{n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in values.items()})


def _declare(pointers: str, numbers: str) -> list[tuple[str, type]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in numbers.split()),
    ]


class _Product(_Fields):
    _fields_ = _declare(
        "a b bias out",
        "rows columns inner a_batch a_row b_batch b_column bias_batch bias_row bias_column",
    )


class _Attention(_Fields):
    _fields_ = [
        *_declare(
            "query keys values mask slopes out lse table starts lengths",
            "sequences tokens heads shared width value_width page_size query_token query_head key_sequence"
            " key_token key_head value_sequence value_token value_head mask_sequence mask_head mask_query"
            " mask_key table_row causal window",
        ),
        ("scale", ctypes.c_float),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.load("exact")


@cache
def works() -> bool:
    """Whether the kernels compile here; if not, one warning says why."""
    try:
        _library()
    except Exception as error:  # no compiler, an old one, a folder that cannot be written to
        warnings.warn(f"the host kernels of exact results cannot be built ({error})", stacklevel=2)
        return False
    return True


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``bias + a @ b`` of batches of matrices in float32."""
    batches, rows, inner = a.shape
    columns = b.size(2)
    a = a if a.stride(2) == 1 or inner == 1 else a.contiguous()
    b = b if b.stride(1) == 1 or inner == 1 else b.mT.contiguous().mT
    out = a.new_empty(batches, rows, columns)
    given = None if bias is None else bias.expand(batches, rows, columns)
    work = _Product(
        a=a,
        b=b,
        bias=given,
        out=out,
        rows=rows,
        columns=columns,
        inner=inner,
        a_batch=a.stride(0),
        a_row=a.stride(1),
        b_batch=b.stride(0),
        b_column=b.stride(2),
        **dict(
            zip(
                ("bias_batch", "bias_row", "bias_column"),
                (0, 0, 0) if given is None else given.stride(),
                strict=True,
            )
        ),
    )
    if out.numel():
        threads = torch.get_num_threads() if out.numel() * inner > SMALL else 1
        _library().exact_product(ctypes.byref(work), ctypes.c_int64(batches), ctypes.c_int64(threads))
    return out


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: int = 1,
    table: Tensor | None = None,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of packed queries, and the log-sum-exps of their scores, in float32.

    Args:
        query: (tokens, heads, width).
        keys: (sequences, keys, heads of keys, width), or pages of these if there is a ``table``.
        values: likewise.
        starts: (sequences + 1,) in int32, where the queries of a sequence begin.
        lengths: (sequences,) in int32.
        causal: 0 for all keys, 1 if the queries are the last of their sequences, 2 if they are the first.
        table: (sequences, pages) in int32.
        mask: (sequences, heads, queries, keys), added to scores.
        slopes: (heads,), what a score loses per token of distance.
        window: how many keys back a query sees.
    """
    tokens, heads, width = query.shape
    query, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values))
    starts, lengths = starts.contiguous(), lengths.contiguous()
    slopes = None if slopes is None else slopes.float().contiguous()
    table = None if table is None else table if table.stride(1) == 1 else table.contiguous()
    out, lse = query.new_empty(tokens, heads, values.size(3)), query.new_empty(tokens, heads)
    if table is not None and not (keys.is_contiguous() and values.is_contiguous()):
        keys, values = keys.contiguous(), values.contiguous()
    work = _Attention(
        query=query,
        keys=keys,
        values=values,
        mask=mask,
        slopes=slopes,
        out=out,
        lse=lse,
        table=table,
        starts=starts,
        lengths=lengths,
        sequences=lengths.numel(),
        tokens=tokens,
        heads=heads,
        shared=heads // keys.size(2),
        width=width,
        value_width=values.size(3),
        page_size=keys.size(1),
        query_token=query.stride(0),
        query_head=query.stride(1),
        key_sequence=keys.stride(0),
        key_token=keys.stride(1),
        key_head=keys.stride(2),
        value_sequence=values.stride(0),
        value_token=values.stride(1),
        value_head=values.stride(2),
        **dict(
            zip(
                ("mask_sequence", "mask_head", "mask_query", "mask_key"),
                (0, 0, 0, 0) if mask is None else mask.stride(),
                strict=True,
            )
        ),
        table_row=0 if table is None else table.stride(0),
        causal=causal,
        window=1 << 60 if window is None else window,
        scale=scale,
    )
    if out.numel():
        threads = torch.get_num_threads() if out.numel() * width > SMALL else 1
        _library().exact_attention(ctypes.byref(work), ctypes.c_int64(threads))
    return out, lse
