"""Parameters and buffers of a model, cut in place as a plan says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossalai.fx.nodes import named_state
from colossalai.mesh import Layout, Mesh, local_shape, place, placement, replicated, shard
from colossalai.mesh.parameter import has_own_mesh, overlapping
from colossalai.mesh.weights.deferred import fill_deferred, recording_of
from colossalai.utils.boosted import is_boosted


def not_serial(model: nn.Module) -> str | None:
    """Why ``model`` is not a serial model any more, of which a plan could be made; None if it is."""
    if is_boosted(model):
        return "the model was boosted already; autoparallelize takes the model before booster.boost"
    for name, tensor in named_state(model).items():
        if has_own_mesh(tensor):
            return (
                "autoparallelize was called on this model before, and its parameters lie as that plan says;"
                " build the model anew, and load its weights with booster.load_model, for another plan"
            )
        if placement(tensor).sharded or hasattr(tensor, "process_group"):
            return f"{name!r} is cut already, as {placement(tensor)}; autoparallelize takes a serial model"
    return None


def placing_problem(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> str | None:
    """Why the tensors of ``model`` cannot be cut as ``layouts`` say; None if they can."""
    if (problem := not_serial(model)) is not None:
        return problem
    state = named_state(model)
    if unknown := sorted(set(layouts) - set(state)):
        return f"the plan places {unknown[0]!r}, which {type(model).__name__} does not have"
    for name, tensor in state.items():
        if tensor.is_meta and recording_of(tensor) is None:
            return (
                f"{name!r} is on the meta device and nothing says which values it has; build the model in"
                " colossalai.lazy.LazyInitContext(), or load its weights first"
            )
        layout = layouts.get(name, replicated(tensor.ndim))
        if layout.partial or layout.spread:
            return f"the plan rests {name!r} as {layout}; a tensor rests cut or alike"
        try:
            local_shape(tuple(tensor.shape), layout, mesh)
        except ValueError as error:
            return f"{name!r} of shape {tuple(tensor.shape)} cannot rest as {layout}: {error}"
    if (found := overlapping(model.named_parameters())) is not None and any(
        layouts.get(name, replicated(0)).sharded for name in found
    ):
        return f"the parameters {found[0]} and {found[1]} lie in the same memory without being one"
    return None


@torch.no_grad()
def place_state(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Cut the tensors of ``model``, one after the other; tensors stay the objects that they are.

    Models without memory are filled on the way, so that no more than one whole tensor is here.
    """
    for name, tensor in named_state(model).items():
        fill_deferred([tensor])
        shape, layout = tensor.shape, layouts.get(name, replicated(tensor.ndim))
        if layout.sharded:
            tensor.data = shard(tensor.data, layout, mesh)
            _cut_gradient(tensor, layout, mesh)
        place(tensor, layout, shape, mesh=mesh)


def _cut_gradient(tensor: Tensor, layout: Layout, mesh: Mesh) -> None:
    if tensor.grad is not None:
        tensor.grad = shard(tensor.grad, layout, mesh)
