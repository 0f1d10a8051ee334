"""The ranks of a job when they save or load: what they tell each other, and how all of them fail if one does.

Messages go over a group of their own, by gloo: so a save in the background never mixes with the communication of training.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_groups: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class Ranks:
    """All ranks of this job; of a process without ``torch.distributed``, that one."""

    def __init__(self) -> None:
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.size = 1 if self.is_alone else dist.get_world_size()
        self._group = None if self.size == 1 else _own_group()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def from_first(self, value: T) -> T:
        """The value of rank 0, on all ranks."""
        if self._group is None:
            return value
        sent = [value]
        dist.broadcast_object_list(sent, group=self._group, group_src=0)
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


def _own_group() -> dist.ProcessGroup:
    """Made once for each default group, by all ranks."""
    world: Any = dist.group.WORLD
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]
