"""Copies of ColoTensors, and what is written of them to files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from colossalai.mesh import Layout
from colossalai.tensor.compute_spec import ComputePattern, ComputeSpec
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.pieces import as_piece, describe, plain_torch
from colossalai.tensor.process_group import TP, JobProcessGroup, ProcessGroup

T = TypeVar("T", bound=Tensor)

# What a ColoTensor keeps beside the tensor; anything else in its __dict__ is the user's.
_OWN = ("process_group", "placement", "full_shape", "compute_spec", "cut_dim", "is_copy")


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """What a script has written on a ColoTensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}


def build(
    kind: type[T],
    piece: Tensor,
    requires_grad: bool,
    pg: ProcessGroup,
    layout: Layout,
    compute_spec: ComputeSpec | None,
    extra: dict[str, Any],
) -> T:
    """A leaf of class ``kind`` that shares the memory of ``piece``; ``extra`` are the user's attributes."""
    with plain_torch():
        tensor = Tensor._make_subclass(kind, piece, requires_grad)
    describe(tensor, pg, layout, compute_spec)
    tensor.__dict__.update(extra)
    return tensor


def deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` of a ColoTensor is; the process group is shared."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError(
                f"only a {type(tensor).__name__} without history can be copied; call detach() first"
            )
        with plain_torch():
            piece = tensor.detach().clone(memory_format=torch.preserve_format)
        compute_spec = copy.deepcopy(tensor.compute_spec, memo)
        where = tensor.process_group, tensor.placement, compute_spec
        new = build(type(tensor), piece, tensor.requires_grad, *where, user_attributes(tensor))
        memo[id(tensor)] = new
        if tensor.grad is not None and not tensor.is_model_data():  # torch copies no gradients of parameters
            new.grad = copy.deepcopy(tensor.grad, memo)
    return memo[id(tensor)]


def reduced(tensor: Any) -> Any:
    """For ``pickle``: the piece of this rank and plain values, which ``torch.load`` reads with
    ``weights_only`` too.
    """
    pg, spec = tensor.process_group, tensor.compute_spec
    dim = tensor.placement.state(TP)
    return rebuild, (
        isinstance(tensor, torch.nn.Parameter),
        as_piece(tensor).detach(),
        tensor.requires_grad,
        (pg._key()[0], pg.tp_world_size()),
        dim if isinstance(dim, int) else None,
        None if spec is None else (spec.compute_pattern.name, spec.output_replicate),
        user_attributes(tensor),
    )


def rebuild(
    is_parameter: bool,
    piece: Tensor,
    requires_grad: bool,
    group: tuple[Sequence[int] | None, int],
    dim: int | None,
    compute: tuple[str, bool] | None,
    extra: dict[str, Any],
) -> Tensor:
    """What ``pickle`` and ``torch.load`` call; every rank of the process group must load."""
    # both use this module
    from colossalai.tensor.colo_parameter import ColoParameter
    from colossalai.tensor.colo_tensor import ColoTensor

    pg = JobProcessGroup() if group[0] is None else ProcessGroup(ranks=group[0], tp_degree=group[1])
    layout = cut_along(dim, piece.ndim)
    compute_spec = None
    if compute is not None:
        compute_spec = ComputeSpec(ComputePattern[compute[0]])
        compute_spec.set_output_replicate(compute[1])
    kind: type[Tensor] = ColoParameter if is_parameter else ColoTensor
    return build(kind, piece, requires_grad, pg, layout, compute_spec, extra)
