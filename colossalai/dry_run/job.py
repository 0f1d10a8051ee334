"""All ranks of a job, run one after the other in a single process, with tensors that have no memory.

Ranks that differ only in their data do the same; of tensor-parallel ranks with pieces of the same sizes one
is played for all, and of stages with the same layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp import AMP_TYPE
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossalai.booster.support import Plan, Wanted, problem_of
from colossalai.context.config import ConfigException
from colossalai.context.fake_launch import fake_launch
from colossalai.context.parallel_config import ParallelConfig
from colossalai.core import global_context as gpc
from colossalai.dry_run.estimate import PlayedStep, play_step, played_alike, stored_microbatches
from colossalai.dry_run.link import Way
from colossalai.dry_run.watch import MemoryEstimate
from colossalai.dry_run.zero import ZeroPlan, divided, estimate_zero, zero_plan
from colossalai.engine.features import Features
from colossalai.mesh import DATA_AXES, PIPELINE_AXIS, full_shape, mesh_coordinates, placement
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.stage import pipeline_rank
from colossalai.utils import is_using_pp
from colossalai.utils.parallel import averaging_size, row_mode


class Parts(NamedTuple):
    """The objects of a training before any feature is added.

    ``batch`` is ``(data, label)``; a model that computes its own loss has no criterion, and takes all of it.
    """

    model: nn.Module
    optimizer: Optimizer
    criterion: Callable[..., Any] | None
    batch: Any


@dataclass(frozen=True)
class RankReport:
    """The result of a dry run for one rank."""

    rank: int
    coord: Mapping[str, int]
    """Its place on the axes of the mesh."""
    parameters: int
    memory: MemoryEstimate


# Called with what is to be done, gives the same and may show how far it is.
Progress = Callable[[list[int]], Iterable[int]]


def dry_run(
    config: Mapping[str, Any], world_size: int, build: Callable[[], Parts], progress: Progress = list
) -> list[RankReport]:
    """Play a training step of every rank of the first data-parallel replica; raises what the job would raise.

    ``build`` is called for each rank, as in a launched job, with the meta device as the default.  A ``zero``
    section is priced by a formula.
    """
    _check_sections(config)
    launched = {key: value for key, value in config.items() if key != "zero"}
    if config.get("zero") is not None:
        # what ZeRO computes in: stages of a pipeline are played with it; an fp16 of the config's own is
        # refused below
        launched["fp16"] = {"mode": AMP_TYPE.NAIVE}
    axes = ParallelConfig.parse(config.get("parallel")).fit(world_size).axes
    first = [axis for axis in axes if axis in DATA_AXES]
    places = [mesh_coordinates(axes, rank) for rank in range(world_size)]
    ranks = [rank for rank, place in enumerate(places) if not any(place[axis] for axis in first)]
    reports: list[RankReport] = []
    player = _Player(build, config)
    for rank in progress(ranks):
        coord = mesh_coordinates(axes, rank)
        last = reports[-1] if reports else None
        if last is not None and player.last_was_even and last.coord[PIPELINE_AXIS] == coord[PIPELINE_AXIS]:
            reports.append(replace(last, rank=rank, coord=coord))
        else:
            with fake_launch(launched, rank, world_size):
                reports.append(player.play(rank, coord))
    return reports


def _check_sections(config: object) -> None:
    """Refuse what names a plugin: the plan of a dry run is in sections, and without one it is plain DDP."""
    plugin = config.get("plugin") if isinstance(config, Mapping) else config
    if plugin is not None or config is None:
        raise ConfigException(
            f"a dry run takes the sections of a config, not a plugin or its name, got {config!r}: write"
            " dict(zero=dict(level=2)) for 'zero2', dict(zero=dict(level=3, placement_policy='cpu')) for"
            " 'gemini', 'cuda' in its place for 'gemini_cuda', and dict() for 'ddp'"
        )


class _Player:
    """Plays ranks; remembers what stages send to each other, and how stages of the same layers were played.

    ``last_was_even``: the other tensor-parallel ranks of the last one have pieces of the same sizes.
    """

    def __init__(self, build: Callable[[], Parts], config: Mapping[str, Any]) -> None:
        self._build, self._config = build, config
        self._specs: dict[tuple[int, ...], dict[Way, Any]] = {}
        self._played: dict[Any, PlayedStep] = {}
        self.last_was_even = False

    def play(self, rank: int, coord: Mapping[str, int]) -> RankReport:
        with torch.device("meta"):
            parts = self._build()
        parameters = sum(p.numel() for p in parts.model.parameters())
        self.last_was_even = all(_is_even(p) for p in parts.model.parameters())
        return RankReport(rank, coord, parameters, self._estimate(parts))

    def _estimate(self, parts: Parts) -> MemoryEstimate:
        zero = None if self._config.get("zero") is None else Features.from_config(self._config).zero
        ranks, plan = averaging_size(), None if zero is None else zero_plan(zero)
        _check_supported(parts, plan)
        if plan is None:
            return self._play(parts)
        model, _, criterion, batch = parts
        if gpc.pipeline_parallel_size == 1:
            return estimate_zero(model, criterion, batch, ranks, plan)
        return divided(self._play(parts, with_step=False), model, ranks, plan)

    def _play(self, parts: Parts, with_step: bool = True) -> MemoryEstimate:
        place = tuple(c for axis, c in gpc.mesh.coord.items() if axis not in (*DATA_AXES, PIPELINE_AXIS))
        specs = self._specs.setdefault(place, {})
        stage, stored = pipeline_rank(gpc.mesh), stored_microbatches()
        shapes = tuple((tuple(p.shape), p.dtype) for p in parts.model.parameters())
        received = specs.get((stage - 1, stage))
        ends = (stage == 0, stage == gpc.pipeline_parallel_size - 1)
        key = (shapes, str(received), ends, played_alike())
        if key not in self._played:
            self._played[key] = play_step(*parts, specs=specs)
        elif received is not None:
            specs[stage, stage + 1] = received  # stages of the same layers send what they get
        return self._played[key].estimate(stored, with_step)


def _check_supported(parts: Parts, zero: ZeroPlan | None) -> None:
    """Refuse what the job would refuse."""
    plan = None
    if zero is not None:
        kind = GeminiPlugin if zero.level == 3 else LowLevelZeroPlugin
        plan = Plan(kind=kind, replicas=averaging_size(), updates_early=zero.updates_early)
    pipeline = PipelineOptions.from_config(gpc.config, gpc.plan) if is_using_pp() else None
    wanted = Wanted(
        model=with_chunks(parts.model),
        optimizer=parts.optimizer,
        plan=plan,
        pipeline=pipeline,
        averaged_over=frozenset(gpc.get_ranks_in_group(row_mode())) if plan is None else frozenset(),
    )
    if (problem := problem_of(wanted)) is not None:
        raise ConfigException(problem)


def _is_even(parameter: Tensor) -> bool:
    cuts = math.prod(gpc.mesh.group_size(*axes) for axes in placement(parameter).dims if axes)
    return parameter.numel() * cuts == full_shape(parameter).numel()


# ---- A dry run as a table for people: one row for all ranks that need the same ----

MIB = 2**20


def format_reports(reports: Sequence[RankReport]) -> str:
    """Ranks, million parameters, MiB of each part, and the moment of the peak."""
    names = [name for name in reports[0].memory.parts if any(r.memory.parts[name] for r in reports)]
    host = any(r.memory.host for r in reports)
    head = ["ranks", "parameters", *names, "peak MiB", "at", *(["host MiB"] if host else [])]
    rows = [head, *(_row(group, names, host) for group in _groups(reports))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _groups(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Equal ranks, in the order of the first of each group."""
    groups: dict[tuple[int, MemoryEstimate], list[RankReport]] = {}
    for report in reports:
        groups.setdefault((report.parameters, report.memory), []).append(report)
    return list(groups.values())


def _row(group: Sequence[RankReport], names: Sequence[str], host: bool) -> list[str]:
    memory = group[0].memory
    return [
        _ranges([r.rank for r in group]),
        f"{group[0].parameters / 10**6:,.1f}M",
        *(mib(memory.parts[name]) for name in names),
        mib(memory.peak),
        memory.moment,
        *([mib(memory.host)] if host else []),
    ]


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}"


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3 and 8."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
