"""Parameters that layers of several pipeline stages hold together, such as an embedding that is also the
output head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.mesh import Mesh
from colossalai.mesh.parameter import SHARED_GROUP, SHARED_MARK, own_grad, set_own_grad
from colossalai.mesh.rows import by_averaging_axes, row_axes
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.pipeline.partition import StageRanges
from colossalai.utils import is_ddp_ignored
from colossalai.utils.bucket import bucket_allreduce, share_presence
from colossalai.utils.parallel import averaging_group, is_cut_over_rows


class Use(NamedTuple):
    """One use of a parameter: the pipeline rank, the layer of the model, and its name in that layer."""

    rank: int
    layer: int
    name: str


def shared_parameters(
    parameters: Sequence[Mapping[str, Tensor]], parts: StageRanges
) -> list[tuple[tuple[int, ...], list[Use]]]:
    """For each parameter on several ranks: these ranks and its uses.

    ``parameters`` are those of each layer, by name.
    """
    rank_of = {layer: rank for rank, ranges in enumerate(parts) for r in ranges for layer in range(*r)}
    uses: dict[int, list[Use]] = {}
    for layer, named in enumerate(parameters):
        for name, p in named.items():
            uses.setdefault(id(p), []).append(Use(rank_of[layer], layer, name))
    by_ranks = [(tuple(sorted({use.rank for use in found})), found) for found in uses.values()]
    return [(ranks, found) for ranks, found in by_ranks if len(ranks) > 1]


def tie_stages(
    layers: Sequence[nn.Module] | Mapping[int, nn.Module],
    parameters: Sequence[Mapping[str, nn.Parameter]],
    parts: StageRanges,
    rank: int,
) -> None:
    """Share what the stages hold together: ``layers`` are as ``rank`` has built them, ``parameters`` as the
    model had them.

    Of ``layers`` those of ``rank`` are enough, by their numbers in the model.

    Every rank of the job calls it.  Without a launched pipeline there is no other stage to share with.
    """
    if not gpc.is_initialized(ParallelMode.PIPELINE):
        return
    _warn_without_parameters(parameters, parts)
    wrappers: dict[tuple[int, ...], PipelineSharedModuleWrapper] = {}
    for ranks, uses in shared_parameters(parameters, parts):  # on every rank in the same order
        if ranks not in wrappers:
            wrappers[ranks] = PipelineSharedModuleWrapper(ranks)
        own = next((use for use in uses if use.rank == rank), None)
        if own is not None:  # further uses on this rank are of the same parameter
            wrappers[ranks].register_parameter(layers[own.layer].get_parameter(own.name))


def check_shared_buffers(layers: Sequence[nn.Module | None], parts: StageRanges) -> None:
    """Refuse a layer that several stages use and that has buffers.

    On several ranks each would keep its own, and a checkpoint would have two values for one buffer; on one
    rank micro-batches come to its places in another order than in the serial model, which statistics of a
    batch norm depend on.
    """
    states = [{} if layer is None else layer.state_dict(keep_vars=True) for layer in layers]
    buffers: list[dict[str, Any]] = [
        {name: t for name, t in state.items() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}
        for state in states
    ]
    stages = [[chunk] for chunks in parts for chunk in chunks]
    for _, uses in shared_parameters(buffers, stages):
        first, second = uses[0], next(use for use in uses if use.rank != uses[0].rank)
        raise ValueError(
            f"layers {first.layer} and {second.layer} of the pipeline are one module, used by two stages, and"
            f" its buffer {first.name!r} would not be that of the serial model; cut the model so that both"
            " are in one stage, use two modules, or register the buffer with persistent=False if it never"
            " changes"
        )


def _warn_without_parameters(parameters: Sequence[Mapping[str, nn.Parameter]], parts: StageRanges) -> None:
    for rank, ranges in enumerate(parts):
        if not any(parameters[layer] for r in ranges for layer in range(*r)):
            get_dist_logger().warning(
                f"rank {rank} of the pipeline gets layers without parameters, and torch's optimizers refuse"
                " an empty list: pass the class of the optimizer to colossalai.initialize, or cut the model"
                " in another way",
                ranks=[0],
            )


def sum_shared_gradients(parameters: Iterable[Tensor]) -> None:
    """Add the gradients of those ``parameters`` that several stages share, over these stages.

    They go in the order in which they were shared: a stage may use first what another one uses last.
    Parameters that a script gave a group itself have no such order and go as the model lists them.
    """
    shared: dict[Any, list[Tensor]] = {}
    for p in sorted(
        (p for p in parameters if hasattr(p, SHARED_GROUP)), key=lambda p: getattr(p, SHARED_MARK, (-1, -1))
    ):
        shared.setdefault(getattr(p, SHARED_GROUP), []).append(p)
    for group, params in shared.items():
        bucket_allreduce(params, group, average=False)


def synchronize_gradients(parameters: Iterable[Tensor], rows: Mesh | None, *, stages: bool = True) -> None:
    """Sum the gradients of weights that stages share over these ``stages``, then average all over the row
    axes of ``rows``, the launched mesh.

    Both doors of a pipeline call this function: ``Booster.execute_pipeline`` after each batch, the gradient
    handlers of an engine before each step.  Without ``rows`` nothing is averaged: ZeRO's optimizer does.
    """
    parameters = list(parameters)
    if stages:
        sum_shared_gradients(parameters)
    if rows is not None:
        # what a row axis cuts (an expert) holds its sum over that axis, and is a mean as all others are
        divisor = rows.group_size(*row_axes(rows))
        averaged = [p for p in parameters if not is_ddp_ignored(p)]
        for axes, params in by_averaging_axes(averaged, rows).items():
            if axes != row_axes(rows):
                share_presence(params, averaging_group())
            bucket_allreduce(params, averaging_group(axes), divisor=divisor)


@contextmanager
def synchronized_gradients(parameters: Iterable[Tensor], rows: Mesh | None) -> Iterator[None]:
    """Synchronize the gradients of the passes inside the block, at its end.

    Gradients that were there before are set aside, and come back also if the block raises: those of weights
    that stages share are sums over the stages already, those of experts divided by their ranks.  (The mean of
    a mean, of any other weight, is the same again.)
    """
    parameters = list(parameters)
    shared = [p for p in parameters if hasattr(p, SHARED_GROUP) or (rows is not None and is_cut_over_rows(p))]
    before = [own_grad(p) for p in shared]
    for p in shared:
        set_own_grad(p, None)
    try:
        yield
        synchronize_gradients(parameters, rows)
    except BaseException:
        for p, grad in zip(shared, before, strict=True):
            set_own_grad(p, grad)
        raise
    for p, grad in zip(shared, before, strict=True):
        if grad is not None:
            new = own_grad(p)
            set_own_grad(p, grad if new is None else grad.add_(new))
