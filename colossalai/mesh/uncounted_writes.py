"""Writes to weights by ``p.data``, which torch does not count.

They are lost without a word where weights are gathered for a forward pass and let go after it, or where an
optimizer steps a copy with more digits.  To compare all weights each time would cost too much, so it is done
less and less often (``is_watched``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from colossalai.mesh._compat import plain_torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_watched(call: int) -> bool:
    """Whether the weights are compared in this call, counted from 1: the first, second, fourth, eighth ...

    A change that begins late, such as that of a weight which has grown too large, is seen before twice as
    many calls.
    """
    return call & (call - 1) == 0


def sums_of_bits(weights: Iterable[Tensor]) -> Tensor | None:
    """A number for each of ``weights`` that follows from all of its bits, so also for NaN; None if there are
    none.
    """
    with plain_torch():  # of a ColoTensor, its piece
        found = [_sum(weight.detach()) for weight in weights]
    return torch.stack(found) if found else None


def _sum(weight: Tensor) -> Tensor:
    values = torch.view_as_real(weight) if weight.is_complex() else weight
    return values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
