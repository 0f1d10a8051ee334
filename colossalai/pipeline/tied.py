"""Parameters that layers of several pipeline stages hold together, such as an embedding that is also the output head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.pipeline.partition import Parts


class Use(NamedTuple):
    """Where a parameter is used: on which pipeline rank, by which layer of the model, under which name in it."""

    rank: int
    layer: int
    name: str


def shared_parameters(
    parameters: Sequence[Mapping[str, nn.Parameter]], parts: Parts
) -> list[tuple[tuple[int, ...], list[Use]]]:
    """For each parameter on several ranks: these ranks and its uses.  ``parameters`` are those of each layer, by name."""
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
    parts: Parts,
    rank: int,
) -> None:
    """Share what the stages hold together: ``layers`` are as ``rank`` has built them, ``parameters`` as the model had them.

    Of ``layers`` those of ``rank`` are enough, by their numbers in the model.

    Every rank of the job calls it.  Without a launched pipeline there is nobody to share with.
    """
    if not gpc.is_initialized(ParallelMode.PIPELINE):
        return
    wrappers: dict[tuple[int, ...], PipelineSharedModuleWrapper] = {}
    for ranks, uses in shared_parameters(parameters, parts):  # on every rank in the same order
        if ranks not in wrappers:
            wrappers[ranks] = PipelineSharedModuleWrapper(ranks)
        own = next((use for use in uses if use.rank == rank), None)
        if own is not None:  # further uses on this rank are of the same parameter
            wrappers[ranks].register_parameter(layers[own.layer].get_parameter(own.name))
