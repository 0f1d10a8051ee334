"""``Holding``: a tensor that a plan keeps, and the elements of a parameter of the model that it holds.

A plan may put something else in the place of a parameter: fp32 masters, or a slice of the flattened parameter
(ZeRO, Gemini).  A checkpoint asks for this, and for nothing else, to know which elements of the model it is
looking at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# In the state dict of an optimizer: the fp32 masters that are in its groups in the place of half-precision
# weights, by number.
MASTERS_KEY = "master_weights"


@dataclass(frozen=True, eq=False)
class Holding:
    """``value`` has the elements ``[start, end)`` of the flattened ``param``; with ``end=None`` all, in its
    shape.

    ``param`` is this rank's parameter of the model, which may itself be a piece of a larger tensor.  Values
    that rest on a disk are fetched when they are read (``colossalai.utils.lazy_tensor``).
    """

    param: Tensor
    value: Tensor
    start: int = 0
    end: int | None = None

    @property
    def is_master(self) -> bool:
        """Whether ``value`` has digits that ``param`` lacks."""
        return self.value is not self.param and self.value.dtype != self.param.dtype

    @property
    def is_empty(self) -> bool:
        """Whether all elements are with other ranks."""
        return self.start == self.end


@dataclass(frozen=True, kw_only=True)
class RestingPlace:
    """Where a plan keeps a parameter between steps, for ``colossalai.utils.summary``."""

    numel: int
    """The elements that this rank keeps."""
    dtype: torch.dtype
    tier: str
    words: str
