"""The private names of torch that mixed precision needs, and nothing else of it; the same in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unscale_and_check(grads: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply ``grads`` by ``inverse_scale`` in place; ``found_inf`` becomes 1 if one of them has an inf or nan.

    All tensors are on one device and all gradients of one dtype.  This is one pass for many tensors.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inverse_scale)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source, cast to its target's dtype, in few launches."""
    torch._foreach_copy_(list(targets), list(sources))


def changes(tensor: Tensor) -> int:
    """A number that grows whenever ``tensor`` is changed in place."""
    return tensor._version
