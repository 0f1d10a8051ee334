"""A float32 number as a bfloat16 number and the 16 bits that it lacks.

The bits of a bfloat16 number are the upper half of those of a float32 number.  So a weight in bfloat16 and
its ``tail``, the lower 16 bits as a signed integer, are together its exact float32 value, in 4 bytes instead
of the 6 of a weight and a separate copy:  ``bits(value) = bits(half) * 2**16 + tail``.  The half is the value
rounded to nearest; a tie is rounded away from zero, because the tail that rounding it to even may need,
2**15, is one too many for 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIE = 1 << 15


def join(half: Tensor, tail: Tensor) -> Tensor:
    """The float32 numbers of which ``half`` (bfloat16) and ``tail`` (int16) are the two halves."""
    return ((half.view(torch.int16).to(torch.int32) << 16) + tail).view(torch.float32)


def split_(value: Tensor, half: Tensor, tail: Tensor) -> None:
    """Write the two halves of the float32 numbers ``value``."""
    bits = value.view(torch.int32)
    upper = (bits + TIE) >> 16
    tail.copy_(bits - (upper << 16))
    half.view(torch.int16).copy_(upper)


def tail_of(value: Tensor, half: Tensor) -> Tensor:
    """The tails with which ``half`` is ``value``; 0 where ``half`` is no rounding of it."""
    missing = value.view(torch.int32).long() - (half.view(torch.int16).long() << 16)
    is_rounded = missing.abs() <= TIE
    return torch.where(is_rounded, missing, 0).clamp(max=TIE - 1).to(torch.int16)
