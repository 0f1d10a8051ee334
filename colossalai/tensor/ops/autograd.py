"""Backward passes that start at, or ask for the gradient of, a ColoTensor: gradients are pieces.

The passes themselves must not run with ColoTensors switched off, since activation checkpointing computes
parts of the model again while they run.  So tensors to start from become plain ones, and tensors to arrive at
become places in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from colossalai.tensor.colo_tensor import ColoTensor
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece, plain_torch


def _pieces(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_pieces(inner) for inner in value)
    return as_piece(value) if isinstance(value, ColoTensor) else value


def _places(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_places(inner) for inner in value)
    if not isinstance(value, ColoTensor):
        return value
    with plain_torch():
        return get_gradient_edge(value)


@colo_op_impl(Tensor.backward)
def _(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(
        _pieces(self), _pieces(gradient), retain_graph, create_graph, inputs=_places(inputs)
    )


@colo_op_impl(torch.autograd.backward)
def _(tensors: Any, grad_tensors: Any = None, inputs: Any = None, **options: Any) -> None:
    torch.autograd.backward(_pieces(tensors), _pieces(grad_tensors), inputs=_places(inputs), **options)


@colo_op_impl(torch.autograd.grad)
def _(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    return torch.autograd.grad(_pieces(outputs), _places(inputs), _pieces(grad_outputs), **options)
