"""The ranks of a job when they save or load: what they tell each other, and how all of them fail if one does.

Messages go over a group of their own, by gloo: so a save in the background never mixes with the communication
of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_groups: weakref.WeakKeyDictionary[Any, dict[bool, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class JobRanks:
    """All ranks of this job, or those of ``group``; of a process without ``torch.distributed``, that one.

    Args:
        background: another thread speaks, while this one may have to speak about the next save.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, background: bool = False) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.group = None if self.size == 1 else group or _own_group(background)
        """The group that messages travel in; None if this process is alone."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: T) -> T:
        """The value of rank 0, on all ranks."""
        if self.group is None:
            return value
        sent = [value]
        dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return sent[0]

    def agree(self, failure: BaseException | None, value: Any = None, what: str = "save") -> list[Any]:
        """Tell all ranks ``value``, and get theirs; if any rank failed, all raise.

        A rank that failed raises its own error, the others one that names the first that did.
        """
        told = None if failure is None else (type(failure).__name__, str(failure))
        outcomes = self.gather((told, None if failure is not None else value))
        if failure is not None:
            raise failure
        for rank, (error, _) in enumerate(outcomes):
            if error is not None:
                raise RuntimeError(f"rank {rank} could not {what}: {error[0]}: {error[1]}")
        return [value for _, value in outcomes]


class FromFirst(Mapping[str, Any]):
    """A mapping of the first rank, on all ranks, which must read the same values in the same order."""

    def __init__(self, ranks: JobRanks, own: Mapping[str, Any]) -> None:
        self._ranks, self._own = ranks, own
        self._names = ranks.from_first(list(own))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._ranks.from_first(self._own.get(name))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _own_group(background: bool) -> dist.ProcessGroup:
    """Made once for each default group, by all ranks."""
    made = _groups.setdefault(dist.group.WORLD, {})
    if background not in made:
        made[background] = dist.new_group(backend="gloo")
    return made[background]
