"""The private names of torch that mixed precision needs, and nothing else of it.

The same in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unscale_and_check(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply ``grads`` by ``inverse_scale`` in place.

    ``found_inf`` becomes 1 if one of them has an inf or nan.

    All tensors are on one device and all gradients of one dtype.  This is one pass for many tensors.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inverse_scale)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source, cast to its target's dtype, in few launches."""
    torch._foreach_copy_(list(targets), list(sources))


def changes(tensor: Tensor) -> int:
    """A number that grows whenever ``tensor`` is changed in place."""
    return tensor._version


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_factor: Tensor,
    b_factor: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """``(a * a_factor) @ (b * b_factor) + bias`` for fp8 matrices, ``b`` laid out by columns.

    The result is of ``dtype``.

    ``fast`` sums with fewer bits, which is good enough going forward.
    """
    fused = bias if dtype is not torch.float32 else None  # the kernel adds no bias to a result in fp32
    out = torch._scaled_mm(a, b, a_factor, b_factor, bias=fused, out_dtype=dtype, use_fast_accum=fast)
    return out + bias if bias is not None and fused is None else out
