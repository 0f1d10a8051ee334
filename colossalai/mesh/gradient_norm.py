"""The norm of all gradients of a model, however its parameters are cut: every distinct piece counts once,
copies do not.

The norm of norms is the norm.  Gradients whose other pieces lie on the same ranks make one number on each
rank; these numbers are gathered from those ranks and joined; then the groups are joined.  Where the other
pieces lie is written on the parameter:

- its ``placement`` names the mesh axes that cut it (a parameter without one is a copy); it may bring a mesh
  of its own (``own_mesh``), any other lies on the mesh of the model;
- torch's ``DTensor`` (FSDP2) brings a device mesh of its own;
- ``is_tensor_parallel``, the mark of layers in the old style, means all tensor axes;
- ``SLICED_OVER`` names a process group whose ranks hold other slices of it (ZeRO).

The ranks of a pipeline hold different parameters, so the result is joined over the axis ``pp`` last.  A
parameter that several stages share (``pipeline_shared_module_pg``) is counted by the first of them; its
gradients have been summed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import colossalai.mesh.collectives as collectives
from colossalai.mesh._compat import multiply_all, norms_of
from colossalai.mesh.mesh import PIPELINE_AXIS, ROW_AXES, Axes, Mesh
from colossalai.mesh.parameter import SHARED_GROUP, own_mesh, placement

# The attribute of a slice of a parameter (ZeRO): the group whose ranks hold the others.
SLICED_OVER = "sliced_over"

Measure = Callable[[list[Tensor], float], list[Tensor]]


@dataclass(frozen=True)
class _Where:
    """Over which ranks the pieces of a parameter lie: axes of our mesh, and groups, of the mesh of a
    ``DTensor`` or of ZeRO.
    """

    axes: Axes = ()
    mesh: Mesh | None = None  # of the axes
    groups: tuple[dist.ProcessGroup, ...] = ()
    device_type: str | None = (
        None  # what the groups can reach: the parts of an offloaded DTensor wait on the CPU
    )

    def order(self) -> tuple[Axes, list[int], list[list[int]]]:
        ranks = [] if self.mesh is None or not self.axes else self.mesh.ranks(*self.axes)
        return self.axes, ranks, [dist.get_process_group_ranks(group) for group in self.groups]


@torch.no_grad()
def grad_norm(
    params: Iterable[Tensor],
    mesh: Mesh | None,
    norm_type: float = 2.0,
    *,
    others: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """The norm of the gradients of the whole model, in fp32, or in fp64 where there are gradients in fp64.

    Every rank that holds a part of the model calls it.

    Args:
        params: this rank's parameters, also those without a gradient here: other ranks may have one, and
            then all join their numbers.
        mesh: the ranks; None for a model of which nothing is cut, but for ``DTensor``.
        others: groups, beside the mesh, whose ranks hold other parameters altogether.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return _over_model(params, mesh, norm_type, norms_of, others)


@torch.no_grad()
def grad_zeros(
    params: Iterable[Tensor], mesh: Mesh | None, *, others: Sequence[dist.ProcessGroup] = ()
) -> int:
    """How many elements of the gradients of the whole model are zero."""

    def count(grads: list[Tensor], _: float) -> list[Tensor]:
        return [(grad == 0).sum(dtype=torch.float64) for grad in grads]

    return round(_over_model(params, mesh, 1.0, count, others, torch.float64).item())


@torch.no_grad()
def clip_grads(
    params: Iterable[Tensor],
    max_norm: float,
    mesh: Mesh | None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    others: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; returns the norm before."""
    check_clipping(max_norm, norm_type)
    params = list(params)
    norm = grad_norm(params, mesh, norm_type, others=others)
    grads = [own_part(p.grad) for p in params if p.grad is not None]
    multiply_all(grads, clip_factor(norm, max_norm, error_if_nonfinite))
    return norm


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Refuse what no gradient can be clipped to."""
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"clipping needs a number as {name}, got {value!r}")
    if not max_norm >= 0:
        raise ValueError(f"clipping needs a max_norm of at least 0, got {max_norm}")


def clip_factor(norm: Tensor, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """What gradients of ``norm`` are multiplied by, so that it is at most ``max_norm``."""
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the norm of all gradients is {norm.item()}, so they cannot be clipped; pass"
            " error_if_nonfinite=False to clip nevertheless"
        )
    # torch's own formula, so that both clip alike
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def own_part(tensor: Any) -> Tensor:
    """The values that this rank holds of a gradient: the local part of a ``DTensor``, the values of a sparse
    tensor.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part._values() if part.is_sparse else part


def _over_model(
    params: Iterable[Tensor],
    mesh: Mesh | None,
    p: float,
    measure: Measure,
    others: Sequence[dist.ProcessGroup],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The ``p``-norm of the numbers, of ``dtype``, that ``measure`` finds in the gradients of the whole
    model; by default as wide as the widest gradients.
    """
    grads: dict[_Where, list[Tensor]] = {}
    params = list(params)
    if dtype is None:  # also where another stage counts every gradient: stages send numbers of one type
        dtype = torch.float64 if any(x.dtype is torch.float64 for x in params) else torch.float32
    devices: list[torch.device] = []
    for param in params:
        if not counts_here(param) or not (param.requires_grad or param.grad is not None):
            continue
        devices.append(param.device)
        # the groups are those of the parameters: a rank that has not used some of them still joins
        parts = grads.setdefault(_where(param, mesh), [])
        if param.grad is not None:
            parts.append(own_part(param.grad))
    found = [part.device for parts in grads.values() for part in parts]
    home = _home(found or devices, mesh)
    joined = []
    # Every rank must join the same groups in the same order, whatever the order of its parameters.
    for where, parts in sorted(grads.items(), key=lambda item: item[0].order()):
        numbers = measure(
            [part for part in parts if part.numel()], p
        )  # a rank may hold nothing of a small tensor
        joined.append(_over_ranks(_join([n.to(home) for n in numbers], p, home, dtype), where, p))
    stages = (PIPELINE_AXIS,) if mesh is not None and PIPELINE_AXIS in mesh.size else ()
    return _over_ranks(_join(joined, p, home, dtype), _Where(stages, mesh, tuple(others)), p)


def counts_here(param: Tensor) -> bool:
    """Whether the norm of the whole model takes ``param`` from this rank: of stages that share it, from the
    first alone.
    """
    group = getattr(param, SHARED_GROUP, None)
    return group is None or dist.get_rank(group) == 0


def _where(param: Any, mesh: Mesh | None) -> _Where:
    mesh = own_mesh(param) or mesh
    axes = piece_axes(param, mesh)
    if not hasattr(param, "placements"):  # a DTensor; a ColoTensor lies where its placement says
        group = getattr(param, SLICED_OVER, None)
        return _Where(axes, mesh if axes else None, () if group is None else (group,))
    dims = [dim for dim, kind in enumerate(param.placements) if not kind.is_replicate()]
    grid = param.device_mesh
    return _Where(axes, mesh if axes else None, tuple(grid.get_group(dim) for dim in dims), grid.device_type)


def tensor_axes(mesh: Mesh) -> Axes:
    """The axes that neither cut rows nor stages: their ranks share layers and have the same tokens."""
    return tuple(axis for axis in mesh.size if axis not in (*ROW_AXES, PIPELINE_AXIS))


def piece_axes(param: Tensor, mesh: Mesh | None) -> Axes:
    """The axes whose ranks hold other pieces of ``param``, major first."""
    cut = placement(param).sharded
    marked = not cut and bool(getattr(param, "is_tensor_parallel", False))
    if mesh is None:
        if cut:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is cut over {', '.join(sorted(cut))}, but no mesh"
                " says who holds its other pieces; call colossalai.launch first, or give the mesh:"
                " clip_grads(params, max_norm, mesh), OptimizerWrapper(optim, mesh)"
            )
        return ()
    if not marked:
        return mesh.in_order(tuple(cut))
    axes = tensor_axes(mesh)
    pieces = getattr(param, "num_partitions", mesh.group_size(*axes))
    if pieces not in (1, mesh.group_size(*axes)):
        raise ValueError(
            f"a parameter is marked as one of num_partitions={pieces} pieces, but the tensor axes of {mesh}"
            f" have {mesh.group_size(*axes)} ranks; say where it lies with colossalai.mesh.place"
        )
    return axes if pieces > 1 else ()


def is_whole(params: Iterable[Tensor], mesh: Mesh | None) -> bool:
    """Whether this rank holds all of a model: no piece of its ``params``, and no parameters besides, are on
    other ranks.
    """
    if mesh is not None and mesh.size.get(PIPELINE_AXIS, 1) > 1:
        return False
    return not any(
        hasattr(p, "device_mesh") or placement(p).sharded or getattr(p, "is_tensor_parallel", False)
        for p in params
    )


def _home(devices: Sequence[torch.device], mesh: Mesh | None) -> torch.device:
    """Where the numbers meet: on the device of the gradients, and not on the CPU if some are elsewhere."""
    devices = devices or [torch.device(mesh.device_type if mesh else "cpu")]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _join(numbers: Sequence[Tensor], p: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not numbers:
        return torch.zeros((), device=device, dtype=dtype)
    if len(numbers) == 1:
        return numbers[0]  # as it is: a power and its root would change the last bit
    return torch.linalg.vector_norm(torch.stack(list(numbers)), p)


def _over_ranks(number: Tensor, where: _Where, p: float) -> Tensor:
    # gathered and joined by torch: a maximum by the backend may lose a nan
    home = number.device
    if where.device_type not in (None, home.type):
        number = number.to(where.device_type)
    for group in where.groups:
        if dist.get_world_size(group) > 1:
            number = torch.linalg.vector_norm(collectives.gather_numbers(number, group), p)
    number = number.to(home)
    for axis in where.axes:
        assert where.mesh is not None
        if where.mesh.size[axis] > 1:
            number = torch.linalg.vector_norm(collectives.all_gather(number.view(1), where.mesh, axis, 0), p)
    return number
