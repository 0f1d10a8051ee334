"""Questions about this rank's place in the parallel plan.

Before a launch the answers are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from colossalai.constants import IS_TENSOR_PARALLEL, TENSOR_PARALLEL_ATTRIBUTES
from colossalai.context import ParallelMode
from colossalai.context.initializer import joined_group
from colossalai.core import global_context as gpc
from colossalai.mesh import (
    PIPELINE_AXIS,
    ROW_AXES,
    Axes,
    Mesh,
    full_shape,
    mesh_coordinates,
    place,
    placement,
)
from colossalai.mesh.gradient_norm import piece_axes, tensor_axes
from colossalai.mesh.parameter import OWN_MESH, SHARED_GROUP, SHARED_MARK, has_own_mesh, model_mesh, own_mesh
from colossalai.mesh.rows import averaging_axes, by_averaging_axes, row_axes, sequence_axes


def launched_mesh() -> Mesh | None:
    """The mesh of the launched job, if there is one: for the doors that give it to what lies below."""
    return gpc.mesh if gpc.is_initialized(ParallelMode.GLOBAL) else None


def mesh_of_model(model: nn.Module) -> Mesh | None:
    """The mesh that ``model`` lies on: one of its own, or that of the launched job."""
    return model_mesh(model) or launched_mesh()


def is_dp_rank_0() -> bool:
    """Whether this is the first rank of its data-parallel group."""
    return not gpc.is_initialized(ParallelMode.DATA) or gpc.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Whether this is the first rank of its tensor-parallel group."""
    return not gpc.is_initialized(ParallelMode.TENSOR) or gpc.is_first_rank(ParallelMode.TENSOR)


def is_first_of_stage() -> bool:
    """Whether this is the first of the ranks that compute with its layers, of all replicas and pieces: the
    one that speaks for them.
    """
    mesh = launched_mesh()
    return mesh is None or not any(place for axis, place in mesh.coord.items() if axis != PIPELINE_AXIS)


def is_no_pp_or_last_stage() -> bool:
    """Whether the loss is computed here: there is no pipeline, or this rank holds its last layers."""
    piped = gpc.is_initialized(ParallelMode.PIPELINE)
    return not piped or gpc.is_pipeline_last_stage(ignore_virtual=True)


def is_using_ddp() -> bool:
    """Whether there is more than one data-parallel rank."""
    return _is_using(ParallelMode.DATA)


def is_using_pp() -> bool:
    """Whether there is more than one pipeline stage."""
    return _is_using(ParallelMode.PIPELINE)


def first_problem(problem: str | None) -> str | None:
    """What is wrong with the first stage of the pipeline that has a problem, told to all of its ranks; None
    if nothing is.

    Without a pipeline it is ``problem``.  To refuse a stage on its own ranks would leave the others waiting.
    """
    if not is_using_pp():
        return problem
    problems: list[str | None] = [None] * gpc.pipeline_parallel_size
    dist.all_gather_object(problems, problem, group=gpc.get_group(ParallelMode.PIPELINE))
    told = (f"{text} (rank {rank} of the pipeline)" for rank, text in enumerate(problems) if text is not None)
    return next(told, None)


@contextmanager
def raised_together(what: str, is_due: bool = True) -> Iterator[None]:
    """Raise, on all ranks of a pipeline, what one stage raises inside: "another stage ``what``"; the others
    would wait for it.

    All of them come here, with the same ``is_due``; if it is false, each rank raises its own.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    told = first_problem(told) if is_due else None
    if failure is not None:
        raise failure
    if told is not None:
        raise RuntimeError(f"another stage {what}: {told}")


def is_using_sequence() -> bool:
    """Whether sequences are divided over ranks (``mode='sequence'``, or ``parallel.sequence``)."""
    return _is_using(ParallelMode.SEQUENCE)


def is_using_moe() -> bool:
    """Whether experts are shared out over ranks (``parallel.moe``)."""
    return _is_using(ParallelMode.MOE_MODEL)


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Whether ``param`` is one piece of a parameter that is divided over tensor-parallel ranks."""
    return bool(
        getattr(param, IS_TENSOR_PARALLEL, False)
        or set(placement(param).sharded) - {*ROW_AXES, PIPELINE_AXIS}
    )


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether this rank is the one, among tensor-parallel ranks with the same values of ``param``, that
    counts them.

    Adding something up over the tensor-parallel ranks where this is true counts every element of a model
    once.
    """
    if not gpc.is_initialized(ParallelMode.TENSOR):
        return True
    cut = piece_axes(param, gpc.mesh)
    return all(gpc.mesh.coord[axis] == 0 for axis in tensor_axes(gpc.mesh) if axis not in cut)


def copy_tensor_parallel_attributes(src_tensor: torch.Tensor, dst_tensor: torch.Tensor) -> None:
    """Write on ``dst_tensor`` where ``src_tensor`` lies: its placement, the stages that share it, the marks
    of old layers.
    """
    if hasattr(src_tensor, "placement"):
        turned = getattr(src_tensor, "transposed", False)
        place(dst_tensor, placement(src_tensor), full_shape(src_tensor), transposed=turned)
    if has_own_mesh(src_tensor):
        setattr(dst_tensor, OWN_MESH, own_mesh(src_tensor))
    elif own_mesh(src_tensor) is not None:  # a ColoParameter is cut over a mesh of its own
        dst_tensor.process_group = src_tensor.process_group  # type: ignore[attr-defined]
    for name in (*TENSOR_PARALLEL_ATTRIBUTES, SHARED_GROUP, SHARED_MARK):
        if hasattr(src_tensor, name):
            setattr(dst_tensor, name, getattr(src_tensor, name))


DDP_IGNORED = "_ddp_to_ignore"  # the attribute of a parameter that data parallelism leaves alone


def is_ddp_ignored(param: torch.Tensor) -> bool:
    """Whether data parallelism leaves ``param`` alone: it is told to, or the plan of the model's own mesh
    makes gradients complete.
    """
    return bool(getattr(param, DDP_IGNORED, False)) or has_own_mesh(param)


def row_mode() -> ParallelMode:
    """The mode that joins all row axes: data, and the sequence if it is cut."""
    return ParallelMode.SEQUENCE_DP if is_using_sequence() else ParallelMode.DATA


def averaging_group(axes: Axes | None = None) -> dist.ProcessGroup | None:
    """Return the ranks over which gradients are averaged, by default over all row axes; None in a process
    alone.

    By the launched config; without a launch, all ranks.  These ranks hold the same weights and compute with
    other tokens, but those of one sequence read the same data: see ``data_place``.
    """
    mesh = launched_mesh()
    if mesh is not None:
        return joined_group(mesh, row_axes(mesh) if axes is None else axes)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def averaging_size() -> int:
    """Over how many ranks gradients of weights that no row axis cuts are averaged."""
    group = averaging_group()
    return 1 if group is None else dist.get_world_size(group)


def data_place(ranks: Sequence[int]) -> tuple[int, int]:
    """Return this rank's place among those of ``ranks`` that read different data, and their number: the ranks
    of one sequence read the same.
    """
    mesh, own = launched_mesh(), dist.get_rank()
    if mesh is not None:
        axes = sequence_axes(mesh)
        coords = {rank: mesh_coordinates(mesh.size, rank) for rank in ranks}
        ranks = [rank for rank in ranks if all(coords[rank][axis] == mesh.coord[axis] for axis in axes)]
    return ranks.index(own), len(ranks)


def share_weights(module: nn.Module) -> None:
    """Let the ranks of the launched job that average a parameter begin with the values of their first; every
    rank calls this.
    """
    if launched_mesh() is not None:
        start_alike((*module.parameters(), *module.buffers()), averaging_group())


def pieces_over_rows(param: torch.Tensor) -> int:
    """Return into how many pieces row axes of the launched mesh cut ``param``; 1 for most.

    The gradient of a piece (of some experts) is a sum over the tokens of the ranks of all pieces: it is
    divided by their number, and averaged over the ranks with the same piece (``averaging_group_of``).
    """
    mesh, cut = launched_mesh(), placement(param).sharded
    return 1 if mesh is None or not cut else mesh.group_size(*(a for a in row_axes(mesh) if a in cut))


def is_cut_over_rows(param: torch.Tensor) -> bool:
    """Whether row axes cut ``param``, so that it is averaged over fewer ranks than others."""
    return pieces_over_rows(param) > 1


def cut_over_rows(module: nn.Module) -> str | None:
    """Return the name of a parameter that a row axis of the launched mesh cuts; None if there is none."""
    return next((name for name, p in module.named_parameters() if is_cut_over_rows(p)), None)


def averaging_group_of(param: torch.Tensor, everyone: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return those of ``everyone``, the ranks of all row axes, that hold the same piece of ``param``: they
    average its gradient, divide its optimizer states and begin with the same values.

    For most parameters these are ``everyone``, as for all in a job that was not launched.
    """
    mesh = launched_mesh()
    if mesh is None or not is_cut_over_rows(param):
        return everyone
    rows, given = mesh.ranks(*row_axes(mesh)), dist.get_process_group_ranks(everyone or dist.group.WORLD)
    if given != rows:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is cut over"
            f" {', '.join(sorted(placement(param).sharded))}, so who averages it follows from the launched"
            f" plan, whose ranks with different tokens are {rows}; got the process group of {given}: leave"
            " process_group out"
        )
    return averaging_group(averaging_axes(param, mesh))


def by_averaging_group(
    params: Iterable[torch.Tensor], everyone: dist.ProcessGroup | None
) -> list[tuple[dist.ProcessGroup | None, list[torch.Tensor]]]:
    """Return ``params`` by their ``averaging_group_of``, in the same order on every rank."""
    mesh, params = launched_mesh(), list(params)
    if mesh is None or not any(map(is_cut_over_rows, params)):
        return [(everyone, params)]
    return [(averaging_group_of(own[0], everyone), own) for own in by_averaging_axes(params, mesh).values()]


def start_alike(tensors: Iterable[torch.Tensor], everyone: dist.ProcessGroup | None) -> None:
    """Give all of ``everyone`` that hold the same pieces the values of their first rank; what lies on a mesh
    of its model's own has no replicas among them.
    """
    tensors = [tensor for tensor in tensors if not has_own_mesh(tensor)]
    for group, own in by_averaging_group(tensors, everyone):
        broadcast_from_first(own, group)


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of ``group`` the values of its first rank."""
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode) -> None:
    """Give all ranks of ``parallel_mode`` the parameters of its first rank."""
    if _is_using(parallel_mode):
        broadcast_from_first(model.parameters(), gpc.get_group(parallel_mode))


@contextmanager
def switch_virtual_pipeline_parallel_rank(rank: int | None) -> Iterator[None]:
    """Be virtual pipeline rank ``rank`` inside the block."""
    previous = gpc.virtual_pipeline_parallel_rank
    gpc.set_virtual_pipeline_parallel_rank(rank)
    try:
        yield
    finally:
        gpc.set_virtual_pipeline_parallel_rank(previous)


def _is_using(parallel_mode: ParallelMode) -> bool:
    return gpc.is_initialized(parallel_mode) and gpc.get_world_size(parallel_mode) > 1
