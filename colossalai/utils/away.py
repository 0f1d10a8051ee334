"""Tensors whose values rest elsewhere, and are fetched when somebody needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FETCH = "colossalai_fetch"  # of a tensor on the meta device: the call that gets its values


def away(shape: Sequence[int], dtype: torch.dtype, fetch: Callable[[], Tensor | None]) -> Tensor:
    """A tensor that has a shape and a dtype; ``fetched`` gets its values."""
    made = torch.empty(tuple(shape), dtype=dtype, device="meta")
    setattr(made, FETCH, fetch)
    return made


def is_away(value: Any) -> bool:
    return hasattr(value, FETCH)


def fetched(tensor: Tensor) -> Tensor:
    """``tensor``, with its values."""
    return getattr(tensor, FETCH)() if is_away(tensor) else tensor
