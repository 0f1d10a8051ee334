"""Tensors whose values rest elsewhere, and are fetched when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

FETCH = "colossalai_fetch"  # of a tensor on the meta device: the call that gets its values
_fetching = threading.RLock()


def lazy_tensor(shape: Sequence[int], dtype: torch.dtype, fetch: Callable[[], Tensor | None]) -> Tensor:
    """A tensor that has a shape and a dtype; ``fetched`` gets its values."""
    made = torch.empty(tuple(shape), dtype=dtype, device="meta")
    setattr(made, FETCH, fetch)
    return made


def is_lazy(value: Any) -> bool:
    return hasattr(value, FETCH)


def fetched(tensor: Tensor) -> Tensor:
    """``tensor``, with its values.  Several threads may ask."""
    if not is_lazy(tensor):
        return tensor
    with _fetching:
        return getattr(tensor, FETCH)()


def fetch_later(value: Any) -> Any:
    """``value``, or, for a tensor whose values are elsewhere, a function that gets them."""
    return partial(fetched, value) if is_lazy(value) else value
