"""Methods that look at the whole tensor without computing with it, and what is made like a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from colossalai.tensor.colo_tensor import ColoTensor, wrap
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece, plain_torch


@colo_op_impl(Tensor.size)
def _(self: Tensor, dim: int | None = None) -> Any:
    if isinstance(self, ColoTensor):
        return self.size_global(dim)
    return Tensor.size(self) if dim is None else Tensor.size(self, dim)


@colo_op_impl(Tensor.__len__)
def _(self: ColoTensor) -> int:
    if not self.ndim:
        raise TypeError("len() of a 0-d tensor")
    return self.full_shape[0]


@colo_op_impl(Tensor.__iter__)
def _(self: Tensor) -> Iterator[Tensor]:
    if not self.ndim:
        raise TypeError("iteration over a 0-d tensor")
    return iter(self.unbind(0))


@colo_op_impl(Tensor.__format__)
def _(self: Tensor, format_spec: str) -> str:
    """``f"{loss:.3f}"``: torch formats numbers of its own class only."""
    return object.__format__(self, format_spec) if self.ndim else format(as_piece(self), format_spec)


def _like(func: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(input: Any, *args: Any, **kwargs: Any) -> Any:
        with plain_torch():
            result = func(input, *args, **kwargs)
        # what is made like a parameter is memory of its optimizer
        if not isinstance(input, ColoTensor) or input.is_model_data():
            return result
        return wrap(result, input.process_group, input.placement)

    return implementation


for _func in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like):
    colo_op_impl(_func)(_like(_func))
