"""Coordination of the ranks of a job: who is the master, who prints, who goes first, who waits.

Nothing is remembered here: every answer is read from ``torch.distributed`` at the moment of the question, so
a coordinator stays right when a job is destroyed and another is launched in the same process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from colossalai.cluster._common import require_job

P = ParamSpec("P")
R = TypeVar("R")

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_WORLD_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


class DistCoordinator:
    """The one coordinator of this process (``DistCoordinator() is DistCoordinator()``).

    Where a method takes ``process_group``, "first", "last" and ``executor_rank`` are counted within that
    group; without it, within the whole job.  A rank outside the group is never its master.
    """

    _instance: DistCoordinator | None = None

    def __new__(cls) -> DistCoordinator:
        require_job("DistCoordinator")
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    @property
    def rank(self) -> int:
        require_job("DistCoordinator")
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        require_job("DistCoordinator")
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank of this process within its node."""
        return _from_launcher("local rank", _LOCAL_RANK_VARIABLES, alone=0)

    @property
    def local_world_size(self) -> int:
        """The number of processes on this node."""
        return _from_launcher("number of processes per node", _LOCAL_WORLD_SIZE_VARIABLES, alone=1)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the job, which must have equally many processes each."""
        if self.world_size % self.local_world_size:
            raise RuntimeError(
                f"the number of nodes is unknown: {self.world_size} ranks are not a multiple of the "
                f"{self.local_world_size} processes on this node"
            )
        return self.world_size // self.local_world_size

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is the first rank."""
        return _rank_in(process_group) == 0

    def is_node_master(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is the last rank."""
        rank = _rank_in(process_group)
        return rank >= 0 and rank == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print on the first rank only."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print once per node."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Let ``executor_rank`` run the block first; the others run it when it is done.

        For a download that all ranks need but one should make: the others find it in place.  If the block
        raises on the executor, it raises on the waiting ranks too, without running there.
        """
        rank = _rank_in(process_group)
        size = dist.get_world_size(process_group)
        if rank < 0:  # not a member: no rank to wait for
            yield
            return
        if not 0 <= executor_rank < size:
            raise ValueError(
                f"priority_execution: executor_rank {executor_rank} is not a rank of a group of {size}; "
                f"its ranks are 0 to {size - 1}"
            )
        if rank == executor_rank:
            try:
                yield
            except BaseException as error:
                _tell(f"{type(error).__name__}: {error}", executor_rank, size, process_group)
                raise
            _tell(None, executor_rank, size, process_group)
        else:
            failure = _tell(None, executor_rank, size, process_group)
            if failure is not None:
                first = dist.get_process_group_ranks(process_group)[executor_rank]
                raise RuntimeError(
                    f"priority_execution: rank {first}, which goes first, failed with {failure}"
                )
            yield

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroy ``process_group``, or the whole job."""
        require_job("DistCoordinator.destroy")
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank has come here."""
        require_job("DistCoordinator.block_all")
        dist.barrier(group=process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """A decorator: the function runs on the first rank only and returns ``None`` on the others.

        ``@coordinator.on_master_only()``, with parentheses.
        """
        if callable(process_group):
            raise TypeError("on_master_only takes a process group; write @coordinator.on_master_only()")

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate


@contextmanager
def priority_execution(
    executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """``DistCoordinator().priority_execution``, for scripts that need no other coordination."""
    with DistCoordinator().priority_execution(executor_rank, process_group):
        yield


def _rank_in(process_group: dist.ProcessGroup | None) -> int:
    """The rank of this process in the group, -1 outside of it."""
    require_job("DistCoordinator")
    return dist.get_rank(process_group)


def _tell(failure: str | None, source: int, size: int, group: dist.ProcessGroup | None) -> str | None:
    """What went wrong on rank ``source`` of the group, told to all its ranks; also makes them wait for it."""
    if size == 1:
        return failure
    message = [failure]
    dist.broadcast_object_list(message, group=group, group_src=source)
    return message[0]


def _from_launcher(what: str, variables: tuple[str, ...], alone: int) -> int:
    require_job("DistCoordinator")
    for variable in variables:
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable])
    if dist.get_world_size() == 1:
        return alone
    raise RuntimeError(
        f"the {what} is unknown: none of {', '.join(variables)} is set; start the job with colossalai run, "
        f"torchrun, srun or mpirun, or set {variables[0]}"
    )
