"""Parameters that know where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh.layout import Layout, replicated, shard
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.movement import redistribute, unshard
from colossalai.mesh.weights.unfilled import Unfilled

# The attribute of a parameter that several pipeline stages hold: the group of the ranks that hold the same
# piece of it.
SHARED_GROUP = "pipeline_shared_module_pg"
# The attribute that tells which shared parameter it is: the same on all ranks, whatever names the stages have
# for it.
SHARED_MARK = "pipeline_shared_mark"
# The attribute of a tensor that lies on a mesh of its model's own, whatever mesh the job was launched with.
OWN_MESH = "placed_on"


def placement(tensor: Tensor) -> Layout:
    """Where ``tensor`` lies; a tensor that was never placed is identical everywhere.

    The attribute is ``placement`` because ``Tensor.layout`` is torch's own.
    """
    layout: Layout | None = getattr(tensor, "placement", None)
    return replicated(tensor.ndim) if layout is None else layout


# The attribute as torch has it, which a subclass may hide.
_GRAD: Any = Tensor.grad
_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__


def own_grad(param: Tensor) -> Tensor | None:
    """The gradient that backward passes left on this rank in ``param.grad``, also where a plan keeps the true
    one elsewhere.
    """
    grad: Tensor | None = _get_grad(param)
    return grad


def set_own_grad(param: Tensor, grad: Tensor | None) -> None:
    """Replace what ``own_grad`` gives."""
    _set_grad(param, grad)


class PlacedParameter(nn.Parameter):
    """A parameter whose copies lie where it lies: torch's own ``deepcopy`` forgets the attributes of a
    parameter.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedParameter:
        if id(self) not in memo:
            memo[id(self)] = super().__deepcopy__(memo)
            memo[id(self)].__dict__.update(self.__dict__)
        return memo[id(self)]


def place(
    tensor: Tensor,
    layout: Layout,
    shape: Iterable[int],
    *,
    transposed: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """Write on ``tensor`` that it is a piece, in ``layout``, of a tensor of ``shape``.

    ``transposed``: the serial model stores this matrix the other way round; layout and shape are as stored
    here.  ``mesh``: that of its model, where it is not the mesh of the launched job; the plan of this mesh
    then makes gradients complete, and no plugin averages them.
    """
    if mesh is not None:
        setattr(tensor, OWN_MESH, mesh)
    tensor.placement, tensor.full_shape = layout, torch.Size(shape)  # type: ignore[attr-defined]
    if transposed:
        tensor.transposed = True  # type: ignore[attr-defined]
    if type(tensor) is nn.Parameter:
        tensor.__class__ = PlacedParameter
    return tensor


def own_mesh(tensor: Any) -> Mesh | None:
    """The mesh that ``tensor`` says that it lies on; None for one that lies on the mesh of the launched job.

    A ColoParameter that is cut brings the mesh of its process group.
    """
    found = getattr(tensor, OWN_MESH, None)
    if found is None and placement(tensor).sharded and hasattr(tensor, "process_group"):
        found = tensor.process_group.mesh
    return found if isinstance(found, Mesh) else None


def has_own_mesh(tensor: Tensor) -> bool:
    """Whether a plan of its own, on a mesh of its own, makes the gradients of ``tensor`` complete."""
    return hasattr(tensor, OWN_MESH)


def model_mesh(model: nn.Module) -> Mesh | None:
    """The mesh that the parameters and buffers of ``model`` lie on, where it is one of the model's own."""
    tensors = (t for part in (model.parameters(), model.buffers()) for t in part)
    return next((own_mesh(t) for t in tensors if has_own_mesh(t)), None)


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor that ``tensor`` is a piece of."""
    shape: torch.Size = getattr(tensor, "full_shape", tensor.shape)
    return shape


def serial_form(whole: Tensor, param: Tensor) -> Tensor:
    """A whole tensor stored like ``param`` (its value, gradient or optimizer state) as the serial model
    stores it.

    It is its own inverse: a tensor of the serial model becomes one that ``placement(param)`` cuts.
    """
    return whole.t() if getattr(param, "transposed", False) else whole


def serial_tensor(piece: Tensor, param: Tensor, mesh: Mesh) -> Tensor:
    """Put together, on every rank, the serial model's tensor that ``piece`` is a part of; not differentiable.

    ``piece`` is laid out like ``param``: its value, gradient or optimizer state.  All ranks must call this.
    """
    return serial_form(unshard(piece, placement(param), mesh, tuple(full_shape(param))), param)


def parameter(full: Tensor, layout: Layout, mesh: Mesh, *, uneven: bool = False) -> nn.Parameter:
    """This rank's piece of ``full`` as a placed parameter."""
    piece = nn.Parameter(shard(full.detach(), layout, mesh, uneven=uneven), requires_grad=full.requires_grad)
    place(piece, layout, full.shape)
    return piece


def use(param: Tensor, rows: Iterable[str], mesh: Mesh) -> Tensor:
    """``param`` about to be applied to rows that the axes ``rows`` cut: its gradient is summed over them."""
    rest = placement(param)
    spread = frozenset(rows).difference(rest.sharded)
    return redistribute(param, rest, _spread(rest, spread), mesh) if spread else param


@lru_cache(maxsize=1024)
def _spread(layout: Layout, axes: frozenset[str]) -> Layout:
    return replace(layout, spread=axes)


def overlapping(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two parameters that lie in the same memory without being one, so that a change of one
    changes the other.

    One of the two has all the memory from its first element to its last, in whatever order; columns of a
    matrix lie between each other.
    """
    with torch._C.DisableTorchFunction():  # Deferred would answer for tensors that it has not built yet
        spans = sorted(
            (*_address(p), not _is_dense(p), p.numel() * p.element_size(), name)
            for name, p in named
            if p.layout is torch.strided and not hasattr(p, "to_local")
            if p.numel() and (isinstance(p, Unfilled) or (not p.is_meta and has_values(p)))
        )
    where, end, before = "", 0, ""  # until where the last dense one goes, and its name
    for device, start, scattered, size, name in spans:
        if device == where and start < end:
            return before, name
        if not scattered:
            where, end, before = device, start + size, name
    return None


def _address(p: Tensor) -> tuple[str, int]:
    """The device of ``p`` and where it lies there; of one without memory, its storage and where in it."""
    if p.is_meta:
        return f"storage {p.untyped_storage()._cdata}", int(p.storage_offset()) * p.element_size()
    return str(p.device), p.data_ptr()


def _is_dense(p: Tensor) -> bool:
    """Whether the elements of ``p``, in some order, are all that lies between its first and its last."""
    return sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) + 1 == p.numel()


def has_values(p: Tensor) -> bool:
    """Whether ``p`` is an ordinary tensor with memory for all elements, and not one that is built later or
    rests elsewhere.
    """
    if type(p) not in (Tensor, nn.Parameter):
        return False
    return p.untyped_storage().nbytes() >= (p.storage_offset() + p.numel()) * p.element_size()
