"""``ProcessGroup``: which ranks cut a tensor between them (tp) and which hold copies of it (dp).

It is a mesh with the two axes ``dp`` (major) and ``tp`` (minor): with 8 ranks, ``tp_degree=4`` and
``dp_degree=2`` the ranks 0-3 are the first tp group, and the ranks 1 and 5 are the dp group of rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from colossalai.mesh import DATA_AXIS, GroupMesh
from colossalai.mesh.group_mesh import new_group

TP = "tp"


# What was made for one default process group, and goes with it: equal process groups share their
# communicators.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()


def _made_once() -> dict[Any, Any]:
    world = dist.group.WORLD
    assert world is not None
    return _made.setdefault(world, {})


class ProcessGroup:
    """The ranks that share a tensor, as ``dp_degree`` x ``tp_degree``.

    A degree that is left out is derived from the other; without both, all ranks hold copies
    (``tp_degree=1``).  Equal process groups are equal objects for ``==`` and share their communicators.

    Args:
        rank: the rank of this process; only checked.
        ranks: the members, by default every rank of the job.  Each rank makes the process group that it
            belongs to.
        tp_degree: ranks that cut a tensor between them; they are neighbours.
        dp_degree: copies.
    """

    def __init__(
        self,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        tp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ProcessGroup needs the ranks of a job: call colossalai.launch first")
        self._ranks = _members(rank, ranks)
        self._tp, self._dp = _degrees(len(self._ranks), tp_degree, dp_degree)
        made, key = _made_once(), (self._ranks, self._tp)
        if key not in made:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            made[key] = GroupMesh(self._ranks, {DATA_AXIS: self._dp, TP: self._tp}, device_type)
        self.mesh: GroupMesh = made[key]

    def rank(self) -> int:
        """The global rank of this process."""
        return self.mesh.rank

    def ranks_in_group(self) -> list[int]:
        """All members."""
        return list(self._ranks)

    def world_size(self) -> int:
        return len(self._ranks)

    def tp_world_size(self) -> int:
        return self._tp

    def dp_world_size(self) -> int:
        return self._dp

    def tp_local_rank(self) -> int:
        """The position of this rank among those that cut a tensor with it."""
        return self.mesh.coord[TP]

    def dp_local_rank(self) -> int:
        """The position of this rank among those that hold a copy of its piece."""
        return self.mesh.coord[DATA_AXIS]

    def tp_rank_list(self) -> list[int]:
        """The global ranks that cut a tensor with this one."""
        return self.mesh.ranks(TP)

    def dp_rank_list(self) -> list[int]:
        """The global ranks that hold a copy of this rank's piece."""
        return self.mesh.ranks(DATA_AXIS)

    get_ranks_in_tp = tp_rank_list
    get_ranks_in_dp = dp_rank_list

    def tp_process_group(self) -> dist.ProcessGroup:
        return self.mesh.group(TP)

    def dp_process_group(self) -> dist.ProcessGroup:
        return self.mesh.group(DATA_AXIS)

    def set_cpu_groups(self) -> None:
        """Make groups for tensors in host memory, where the job's backend does not serve them; every member
        calls it.
        """
        for axis in (TP, DATA_AXIS):
            self._cpu_group(axis, make=True)

    @property
    def has_cpu_groups(self) -> bool:
        """Whether tensors in host memory can be sent; always so where gloo is part of the job's backend."""
        return _serves_cpu() or ("cpu", self._ranks, self._tp, TP) in _made_once()

    def cpu_tp_process_group(self) -> dist.ProcessGroup:
        return self._cpu_group(TP)

    def cpu_dp_process_group(self) -> dist.ProcessGroup:
        return self._cpu_group(DATA_AXIS)

    def _cpu_group(self, axis: str, make: bool = False) -> dist.ProcessGroup:
        if _serves_cpu():
            return self.mesh.group(axis)
        made, key = _made_once(), ("cpu", self._ranks, self._tp, axis)
        if key not in made:
            if not make:
                raise RuntimeError(
                    f"the backend {dist.get_backend_config()} does not serve tensors in host memory; call "
                    "set_cpu_groups() on every rank of the process group first"
                )
            made[key] = new_group(self.mesh.ranks(axis), "gloo")
        return made[key]

    def _key(self) -> tuple[tuple[int, ...] | None, int]:
        return self._ranks, self._tp

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._tp)  # the ranks may not be known yet

    def __repr__(self) -> str:
        return f"ProcessGroup(ranks={list(self._ranks)}, tp_degree={self._tp}, dp_degree={self._dp})"

    def __reduce__(self) -> tuple[Any, ...]:
        # communicators cannot be written to a file: the process that reads it makes its own
        return ProcessGroup, (None, self._ranks, self._tp, self._dp)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        return self


class JobProcessGroup(ProcessGroup):
    """All ranks of a job that need not be launched yet; each holds a copy of all tensors.

    Before the launch it can lie under tensors that are whole, and knows nothing about ranks.
    """

    _tp = 1

    def __init__(self) -> None:
        if dist.is_initialized():
            super().__init__()

    def __getattr__(self, name: str) -> Any:
        if name not in ("_ranks", "_dp", "mesh"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        super().__init__()  # refuses if there is no job yet
        return self.__dict__[name]

    def _key(self) -> tuple[tuple[int, ...] | None, int]:
        return (self._ranks if self.is_launched else None), self._tp

    @property
    def is_launched(self) -> bool:
        return "_ranks" in self.__dict__ or dist.is_initialized()

    def __repr__(self) -> str:
        return super().__repr__() if self.is_launched else "ProcessGroup(all ranks of the job, tp_degree=1)"

    def __reduce__(self) -> tuple[Any, ...]:
        return JobProcessGroup, ()


def _serves_cpu() -> bool:
    return "gloo" in dist.get_backend_config() or "fake" in dist.get_backend_config()


def _members(rank: int | None, ranks: Sequence[int] | None) -> tuple[int, ...]:
    own, world = dist.get_rank(), dist.get_world_size()
    if rank is not None and rank != own:
        raise ValueError(f"ProcessGroup(rank={rank}) is made by rank {own}; leave rank out")
    if ranks is None:
        return tuple(range(world))
    members = tuple(sorted(ranks))
    if len(set(members)) != len(members) or not all(0 <= r < world for r in members):
        raise ValueError(
            f"ProcessGroup(ranks={list(ranks)}) must name ranks from 0 to {world - 1}, each once: the job has"
            f" {world} ranks"
        )
    if own not in members:
        raise ValueError(
            f"rank {own} is not one of ProcessGroup(ranks={list(ranks)}); each rank makes the process group"
            " that it belongs to, and no other"
        )
    return members


def _degrees(size: int, tp_degree: int | None, dp_degree: int | None) -> tuple[int, int]:
    given = f"ProcessGroup(tp_degree={tp_degree}, dp_degree={dp_degree}) over {size} ranks"
    for degree in (tp_degree, dp_degree):
        if degree is not None and (not isinstance(degree, int) or degree < 1 or size % degree):
            raise ValueError(
                f"{given}: a degree must be an integer from 1 that divides {size}, got {degree!r}"
            )
    tp = tp_degree or (1 if dp_degree is None else size // dp_degree)
    dp = dp_degree or size // tp
    if tp * dp != size:
        raise ValueError(
            f"{given}: {tp} x {dp} = {tp * dp}, not {size}; leave one degree out and it is derived from the"
            " other"
        )
    return tp, dp
