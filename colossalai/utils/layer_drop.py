"""Models that leave out whole layers at random (``layerdrop``), without leaving out any for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _NeverDropped:
    """A rate at which layers are left out that no drawn number is below, so that no layer is.

    It is no float, which a tensor would compare by itself.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __gt__(self, other: object) -> bool:
        return False

    def __ge__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return self._rate


@contextmanager
def all_layers(model: nn.Module) -> Iterator[list[float]]:
    """Inside the block, ``model`` leaves out no layer, where it else draws anew in every step which ones it
    leaves out.  Yields the rates of that.
    """
    found: list[tuple[dict[str, Any], str, float]] = []
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None))}
    owners = [*model.modules(), *configs.values()]
    for attributes in (vars(owner) for owner in owners if hasattr(owner, "__dict__")):
        for name, value in attributes.items():
            if "layerdrop" in name.lower() and isinstance(value, float):
                found.append((attributes, name, value))
    try:
        for attributes, name, value in found:
            attributes[name] = _NeverDropped(value)
        yield sorted({value for _, _, value in found} - {0.0})
    finally:
        for attributes, name, value in found:
            attributes[name] = value
