"""``ParallelContext``: what a process knows about its place in the job, by the documented names.

It is a view: sizes come from the ``parallel`` section of the config, groups from the mesh and from the
initializers.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from colossalai.context.backend import resolve_backend
from colossalai.context.config import Config
from colossalai.context.config_schema import is_positive_int, load_config
from colossalai.context.initializer import GroupInfo, check_initializers, joined_group, make_groups
from colossalai.context.parallel_config import ParallelConfig
from colossalai.context.parallel_mode import ParallelMode
from colossalai.context.random import add_seed, get_seeds, reset_seeds, set_mode
from colossalai.context.rendezvous import Rendezvous, read_timeout
from colossalai.context.singleton_meta import SingletonMeta
from colossalai.context.tensor_modes import creators
from colossalai.global_variables import moe_env, tensor_parallel_env
from colossalai.logging import get_dist_logger, set_rank_resolver
from colossalai.mesh import DATA_AXIS, Mesh
from colossalai.mesh.rows import averaging_choices


class ParallelContext(metaclass=SingletonMeta):
    """The config, mesh and process groups of this process.

    ``colossalai.launch`` fills it, ``destroy`` empties it.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.verbose = False
        self.world_size = 1
        self.data_parallel_size = 1
        self.pipeline_parallel_size = 1
        self.tensor_parallel_size = 1
        self.num_processes_on_current_node = -1
        self.virtual_pipeline_parallel_size: int | None = None
        self.virtual_pipeline_parallel_rank: int | None = None
        self._config = Config()
        self._plan = ParallelConfig()
        self._mesh: Mesh | None = None
        self._groups: dict[ParallelMode, GroupInfo] = {}
        self._global_ranks: dict[ParallelMode, int] = {}
        self._node_rank: int | None = None

    # ---- config ----

    @property
    def config(self) -> Config:
        return self._config

    @property
    def plan(self) -> ParallelConfig:
        """The ``parallel`` section of the config as an object."""
        return self._plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job, whose axes all process groups are made of."""
        if self._mesh is None:
            raise RuntimeError("there is no mesh yet; call colossalai.launch first")
        return self._mesh

    def load_config(self, config: Config | Mapping[str, Any] | str | Path | None) -> None:
        """Read and check a config: a dict or the path of a file."""
        loaded = load_config(config)
        self._plan = ParallelConfig.parse(loaded.get("parallel"))
        self._config = loaded

    def check_sanity(self) -> None:
        """Refuse a config that does not fit the world size, and initializers that cannot be called; no
        communication.
        """
        self._plan = self._plan.fit(self.world_size)
        check_initializers(self._plan)
        assert self._plan.data is not None
        self.data_parallel_size = self._plan.data
        self.pipeline_parallel_size = self._plan.pipeline
        self.tensor_parallel_size = self._plan.tensor

    # ---- start and end ----

    def init_global_dist(self, rank: int, world_size: int, backend: str | None, host: str, port: int) -> None:
        """Meet the other ranks at ``host:port`` and make the group of all."""
        refuse_second_launch()
        backend = resolve_backend(backend)
        self.world_size = world_size
        self.check_sanity()
        plan = self._plan
        store = Rendezvous(
            rank=rank,
            world_size=world_size,
            host=host.strip("[]"),
            port=port,
            timeout=read_timeout(),
            plan=f"backend={backend}, data={plan.data}, moe={plan.moe}, pipeline={plan.pipeline},"
            f" sequence={plan.sequence} ({plan.attention}, ulysses={plan.ulysses}), tensor={plan.tensor},"
            f" mode={plan.mode}",
        ).meet()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        self.take_place(rank, world_size)

    def take_place(self, rank: int, world_size: int) -> None:
        """Be ``rank`` of the process group that ``torch.distributed`` has."""
        self.world_size = world_size
        world = dist.group.WORLD
        self._register(
            GroupInfo(rank, world_size, world, world, list(range(world_size)), ParallelMode.GLOBAL)
        )
        self.add_global_rank(ParallelMode.GLOBAL, rank)
        set_rank_resolver(self.get_local_rank)

    def init_parallel_groups(self) -> None:
        """Make the mesh and all groups that the config asks for.  ``set_device`` comes before it on CUDA."""
        self.get_global_rank()
        self.check_sanity()
        self._mesh = Mesh(self._plan.axes, "cuda" if torch.cuda.is_available() else "cpu")
        for info in make_groups(self._plan, self._config, self._mesh):
            self._register(info)
        for axes in averaging_choices(self._mesh):
            joined_group(self._mesh, axes)
        tensor_parallel_env.load(**self._plan.env_fields)
        moe_env.setup(self._plan.moe, self._plan.axes[DATA_AXIS])
        # A rank that ended now would tear its connections down while a slower one still makes its groups.
        dist.all_reduce(torch.zeros(1), group=self.get_cpu_group(ParallelMode.GLOBAL))

    def destroy(self) -> None:
        """Close all groups and forget everything, so that this process can launch again."""
        if dist.is_initialized():
            dist.destroy_process_group()
        set_rank_resolver(None)
        reset_seeds()
        tensor_parallel_env.load()
        self._clear()

    def _register(self, info: GroupInfo) -> None:
        if info.mode in self._groups:
            raise ValueError(f"{info.mode} already has a process group; two initializers made one")
        self._groups[info.mode] = info

    # ---- groups ----

    def is_initialized(self, parallel_mode: ParallelMode) -> bool:
        """Whether the job has a process group for this mode."""
        return parallel_mode in self._groups

    def get_global_rank(self) -> int:
        self._info(ParallelMode.GLOBAL)
        return self._global_ranks[ParallelMode.GLOBAL]

    def add_global_rank(self, parallel_mode: ParallelMode, rank: int) -> None:
        """Note the rank of this process; under ``ParallelMode.GLOBAL`` it is what ``get_global_rank``
        returns.
        """
        self._global_ranks[parallel_mode] = rank

    def get_local_rank(self, parallel_mode: ParallelMode) -> int:
        """The rank of this process inside its group."""
        return self._info(parallel_mode).local_rank

    def get_world_size(self, parallel_mode: ParallelMode) -> int:
        return self._info(parallel_mode).group_size

    def get_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup | None:
        return self._info(parallel_mode).group

    def get_cpu_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup | None:
        """A group of the same ranks that carries CPU tensors, also when the backend is NCCL."""
        return self._info(parallel_mode).cpu_group

    def get_ranks_in_group(self, parallel_mode: ParallelMode) -> list[int]:
        """The global ranks of the group, in its order."""
        return self._info(parallel_mode).ranks

    def get_next_global_rank(self, parallel_mode: ParallelMode) -> int:
        """The global rank of the next member of the group; after the last comes the first."""
        return self._neighbour(parallel_mode, +1)

    def get_prev_global_rank(self, parallel_mode: ParallelMode) -> int:
        return self._neighbour(parallel_mode, -1)

    def is_first_rank(self, parallel_mode: ParallelMode) -> bool:
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode) -> bool:
        return self.get_local_rank(parallel_mode) == self.get_world_size(parallel_mode) - 1

    def _neighbour(self, parallel_mode: ParallelMode, step: int) -> int:
        info = self._info(parallel_mode)
        return info.ranks[(info.local_rank + step) % info.group_size]

    def _info(self, parallel_mode: ParallelMode) -> GroupInfo:
        if not isinstance(parallel_mode, ParallelMode):
            raise TypeError(f"expected a ParallelMode, got {type(parallel_mode).__name__} {parallel_mode!r}")
        if parallel_mode in self._groups:
            return self._groups[parallel_mode]
        if not self._groups:
            raise RuntimeError(f"{parallel_mode} has no process group yet; call colossalai.launch first")
        known = creators(parallel_mode)
        remedy = (
            "parallel=dict(moe=dict(size=...))"
            if known == ["moe"]
            else f"parallel=dict(tensor=dict(size=..., mode={known[0]!r}))"
            + (", or by parallel=dict(sequence=...)" if known == ["sequence"] else "")
            if known
            else f"a parallel.tensor.mode whose initializer returns a group for {parallel_mode}"
        )
        raise RuntimeError(
            f"{parallel_mode} has no process group under tensor mode {self._plan.mode!r}; it is created by"
            f" {remedy}"
        )

    # ---- pipeline stages ----

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank holds the first layers; with virtual stages, in the chunk that is current."""
        chunk = self.virtual_pipeline_parallel_rank
        return (ignore_virtual or chunk in (None, 0)) and self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank holds the last layers; with virtual stages, in the chunk that is current."""
        chunk, chunks = self.virtual_pipeline_parallel_rank, self.virtual_pipeline_parallel_size
        at_last_chunk = ignore_virtual or chunk is None or chunks is None or chunk == chunks - 1
        at_end = self.is_first_rank if self._plan.is_vee else self.is_last_rank
        return at_last_chunk and at_end(ParallelMode.PIPELINE)

    def set_virtual_pipeline_parallel_size(self, size: int | None) -> None:
        """How many chunks of layers each stage holds; None ends the use of virtual stages."""
        if size is not None and not is_positive_int(size):
            raise ValueError(f"the virtual pipeline size must be a positive integer or None, got {size!r}")
        self.virtual_pipeline_parallel_size = size
        self.virtual_pipeline_parallel_rank = None

    def set_virtual_pipeline_parallel_rank(self, rank: int | None) -> None:
        """Which chunk of this stage is current."""
        size = self.virtual_pipeline_parallel_size
        if rank is not None and (size is None or isinstance(rank, bool) or rank not in range(size)):
            raise ValueError(
                f"virtual pipeline rank {rank!r} is outside the virtual pipeline size {size}; "
                "call set_virtual_pipeline_parallel_size first, then give a rank below it"
            )
        self.virtual_pipeline_parallel_rank = rank

    # ---- device and random numbers ----

    def detect_num_processes_on_current_node(self) -> None:
        """Count the processes on this machine, and this one's place among them."""
        names: list[Any] = [None] * self.world_size
        dist.all_gather_object(names, socket.gethostname(), group=self.get_cpu_group(ParallelMode.GLOBAL))
        rank = self.get_global_rank()
        self.num_processes_on_current_node = names.count(names[rank])
        self._node_rank = names[:rank].count(names[rank])

    def set_device(self, ordinal: int | None = None) -> None:
        """Bind this process to a CUDA device: ``ordinal``, or its place on this machine, modulo the devices
        there.
        """
        if torch.cuda.is_available():
            if ordinal is None:
                if self._node_rank is None:
                    self.detect_num_processes_on_current_node()
                ordinal = self._node_rank or 0
            device = f"cuda:{ordinal % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        else:
            device = "cpu"
        if self.verbose:
            self._say(f"process rank {self.get_global_rank()} is bound to device {device}")

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy and torch equally on all ranks, then the streams of DATA (equal) and TENSOR
        (different).
        """
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        stage = self.get_local_rank(ParallelMode.PIPELINE)
        tensor_seed = seed + self.get_local_rank(ParallelMode.TENSOR) + 1024 * stage
        add_seed(ParallelMode.DATA, seed, overwrite=True)
        add_seed(ParallelMode.TENSOR, tensor_seed, overwrite=True)
        set_mode(ParallelMode.DATA)
        seeds = ", ".join(f"{mode}: {value}" for mode, value in get_seeds().items())
        if self.verbose:
            self._say(
                f"initialized seed on rank {self.get_global_rank()}, numpy: {seed}, python random: {seed}, "
                f"{seeds},the default parallel seed is {ParallelMode.DATA}."
            )

    def _say(self, message: str) -> None:
        """Log what every rank has to say of itself: rank 0 as INFO, the others, which rarely differ, as
        DEBUG.
        """
        logger = get_dist_logger()
        (logger.info if self.get_global_rank() == 0 else logger.debug)(message)


def refuse_second_launch() -> None:
    """A process is one rank of one job at a time."""
    if dist.is_initialized():
        raise RuntimeError(
            "this process is already launched (torch.distributed is initialized); launch once, or call "
            "colossalai.core.global_context.destroy() before launching again"
        )


global_context = ParallelContext()
