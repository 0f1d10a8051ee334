"""A layer that is not built yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class LayerSpec:
    """``typename(*args, **kwargs)``, to be called by the rank that needs the layer; others only count its
    parameters.
    """

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(typename):
            raise TypeError(
                f"LayerSpec needs the class of a layer, or a function that builds it, got {typename!r}"
            )
        self.typename, self.args, self.kwargs = typename, args, kwargs
        self.children: tuple[LayerSpec, ...] = ()
        self._param_count: int | None = None

    def set_children(self, children: Sequence[LayerSpec]) -> None:
        """The specs of the layers inside: ``build`` passes what they build before the other arguments."""
        self.children = tuple(children)
        self.reset_param_count()

    def build(self) -> nn.Module:
        return self.typename(*(child.build() for child in self.children), *self.args, **self.kwargs)

    def count_params(self) -> int:
        """How many numbers the layer learns; it is built on the meta device, without memory."""
        with torch.device("meta"):
            self._param_count = sum(p.numel() for p in self.build().parameters())
        return self._param_count

    @property
    def param_count(self) -> int:
        return self.count_params() if self._param_count is None else self._param_count

    def reset_param_count(self) -> None:
        """Forget the count, after a change of the arguments."""
        self._param_count = None

    def __repr__(self) -> str:
        name = getattr(self.typename, "__name__", repr(self.typename))
        given = [*map(repr, (*self.children, *self.args)), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"LayerSpec({', '.join([name, *given])})"
