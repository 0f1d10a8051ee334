"""Whether a forward pass has changed weights by ``p.data``, which torch does not count as a write.

Where weights are gathered for a forward pass and let go after it, such a change is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_watched(call: int) -> bool:
    """Whether the weights are compared in this call, counted from 1: to read all of them each time would cost too much.

    A change that begins late, such as that of a weight which has grown too large, is seen before twice as many calls.
    """
    return call & (call - 1) == 0


def sums_of_bits(weights: Iterable[Tensor]) -> Tensor | None:
    """A number for each of ``weights`` that follows from all of its bits, so also for NaN; None if there are none."""
    found = [_sum(weight.detach()) for weight in weights]
    return torch.stack(found) if found else None


def _sum(weight: Tensor) -> Tensor:
    values = torch.view_as_real(weight) if weight.is_complex() else weight
    return values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
