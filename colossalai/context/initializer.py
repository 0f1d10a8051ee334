"""Makes process groups: an initializer per part of the ``parallel`` config, looked up by name.

Our own initializers all do the same, look the axes of their modes up in the one table and take the group from
the mesh.  A user adds a parallel mode by writing another class (docs/source/en/parallel_context.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from colossalai.constants import INITIALIZER_MAPPING
from colossalai.context.config import ConfigException
from colossalai.context.parallel_config import ParallelConfig
from colossalai.context.parallel_mode import ParallelMode
from colossalai.mesh import Axes, Mesh
from colossalai.registry import DIST_GROUP_INITIALIZER


class GroupInfo(NamedTuple):
    """This rank's group for one mode: the tuple that an initializer returns."""

    local_rank: int
    group_size: int
    group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup | None
    ranks: list[int]
    mode: ParallelMode


class ProcessGroupInitializer:
    """Base class.  Override ``init_dist_group`` (or, the other documented name, ``init_parallel_groups``).

    It returns the tuple ``(local_rank, group_size, group, cpu_group, ranks, ParallelMode)`` of this rank, or
    a list of such tuples, or None.  Sizes that are left out are read from the config.
    """

    # The mesh of the job; the context sets it before it asks for groups.
    mesh: Mesh | None = None

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Mapping[str, Any],
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        sizes = (data_parallel_size, pipeline_parallel_size, tensor_parallel_size)
        if None in sizes:
            plan = ParallelConfig.parse(config.get("parallel")).fit(world_size)
            sizes = (plan.data, plan.pipeline, plan.tensor)
        self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size = sizes

    def init_dist_group(self) -> tuple[Any, ...] | list[tuple[Any, ...]] | None:
        if type(self).init_parallel_groups is ProcessGroupInitializer.init_parallel_groups:
            raise TypeError(f"{type(self).__name__} must define init_dist_group() or init_parallel_groups()")
        return self.init_parallel_groups()

    def init_parallel_groups(self) -> tuple[Any, ...] | list[tuple[Any, ...]] | None:
        return self.init_dist_group()

    def new_group(self, groups: Sequence[Sequence[int]], mode: ParallelMode) -> GroupInfo:
        """Make all ``groups`` (lists of ranks that share out the world) and return the one of this rank."""
        mine: GroupInfo | None = None
        for ranks in groups:
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = GroupInfo(list(ranks).index(self.rank), len(ranks), group, group, list(ranks), mode)
        if mine is None:
            raise ValueError(
                f"rank {self.rank} is in none of the groups of {mode}: {[list(g) for g in groups]}"
            )
        return mine


class TableInitializer(ProcessGroupInitializer):
    """An initializer whose groups follow from the config and the table of modes and axes."""

    modes: ClassVar[tuple[ParallelMode, ...]] = ()

    def init_dist_group(self) -> GroupInfo | list[GroupInfo]:  # type: ignore[override]
        plan = ParallelConfig.parse(self.config.get("parallel")).fit(self.world_size)
        axes = plan.mode_axes
        if unknown := [mode for mode in self.modes if mode not in axes]:
            raise ConfigException(
                f"{type(self).__name__} cannot make {unknown[0]} with tensor mode {plan.mode!r}"
            )
        mesh = self.mesh or Mesh(plan.axes)
        infos = [group_info(mesh, axes[mode], mode) for mode in self.modes]
        return infos[0] if len(infos) == 1 else infos


def group_info(mesh: Mesh, axes: Axes, mode: ParallelMode) -> GroupInfo:
    """The group of this rank over ``axes``.  Modes that join the same ranks share one process group."""
    ranks, group = mesh.ranks(*axes), joined_group(mesh, axes)
    return GroupInfo(ranks.index(mesh.rank), len(ranks), group, group, ranks, mode)


def joined_group(mesh: Mesh, axes: Axes) -> dist.ProcessGroup:
    """The process group over ``axes``: that of all ranks, or of those axes that have several, if these are
    the same ranks.
    """
    world: Any = dist.group.WORLD
    wide = tuple(axis for axis in axes if mesh.size[axis] > 1)
    whole = mesh.group_size(*axes) == dist.get_world_size()
    return world if whole else mesh.group(*(wide or axes[:1]))


def check_initializers(plan: ParallelConfig) -> None:
    """Refuse a plan whose initializers do not exist or do not take its options, before any group is made."""
    for name in plan.initializers:
        class_name = INITIALIZER_MAPPING[name]
        if not DIST_GROUP_INITIALIZER.has(class_name):
            raise ConfigException(
                f"INITIALIZER_MAPPING[{name!r}] is {class_name!r}, but no such class is registered; decorate"
                " it with @DIST_GROUP_INITIALIZER.register_module and import its module before launch"
            )
        options = plan.group_options if name == plan.mode else {}
        try:
            inspect.signature(DIST_GROUP_INITIALIZER.get_module(class_name)).bind(*range(6), **options)
        except TypeError as error:
            raise ConfigException(
                f"parallel.tensor with mode {name!r}: {class_name} cannot take the options {dict(options)}:"
                f" {error}"
            ) from None


def make_groups(plan: ParallelConfig, config: Mapping[str, Any], mesh: Mesh) -> list[GroupInfo]:
    """All groups of this rank, made in the same order on every rank."""
    infos: list[GroupInfo] = []
    for name in plan.initializers:
        options = plan.group_options if name == plan.mode else {}
        initializer = DIST_GROUP_INITIALIZER.get_module(INITIALIZER_MAPPING[name])(
            mesh.rank, dist.get_world_size(), config, plan.data, plan.pipeline, plan.tensor, **options
        )
        initializer.mesh = mesh
        infos += _as_list(initializer.init_dist_group(), type(initializer).__name__)
    return infos


def _as_list(result: Any, who: str) -> list[GroupInfo]:
    results = [] if result is None else result if isinstance(result, list) else [result]
    for one in results:
        if not isinstance(one, tuple) or len(one) != 6 or not isinstance(one[5], ParallelMode):
            raise TypeError(
                f"{who}.init_dist_group() must return tuples (local_rank, group_size, group, cpu_group,"
                f" ranks, ParallelMode), got {one!r}"
            )
    return [GroupInfo(*one) for one in results]
