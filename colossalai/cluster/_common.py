"""Shared parts of the cluster tools: a check that the job has started, and tables of named groups."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def require_job(who: str) -> None:
    """Refuse to go on before ``torch.distributed`` is initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} needs torch.distributed, which is not initialized; "
            f"call colossalai.launch_from_torch (or another launch function) first"
        )


def check_ranks(who: str, ranks: list[int]) -> None:
    """Refuse ranks that are not distinct ranks of this job; no communication."""
    world = dist.get_world_size()
    if not ranks:
        raise ValueError(f"{who} needs at least one rank, got none")
    if strange := [r for r in ranks if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < world]:
        raise ValueError(f"{who}: {strange[0]!r} is not a rank of this job, whose ranks are 0 to {world - 1}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{who} lists a rank twice: {ranks}")


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy ``group`` unless it is gone already or is the group of the whole job."""
    if group is dist.group.WORLD:
        return
    try:
        dist.get_process_group_ranks(group)
    except KeyError:  # destroyed elsewhere, or this rank is not a member
        return
    dist.destroy_process_group(group)


class NameTable(Generic[T]):
    """Things of one ``kind`` by name.  When the job that they belong to ends, their names are free again."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._job: dist.ProcessGroup | None = None
        self._things: dict[str, T] = {}

    def names(self) -> list[str]:
        return list(self._of_this_job())

    def check_free(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a {self._kind} is a string that is not empty, got {name!r}")
        if name in self._of_this_job():
            raise ValueError(
                f"there is already a {self._kind} called {name!r}; choose another name or destroy it first"
            )

    def add(self, name: str, thing: T) -> None:
        self._of_this_job()[name] = thing

    def get(self, name: str) -> T:
        things = self._of_this_job()
        if name not in things:
            close = get_close_matches(str(name), things, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(things) or 'none'}"
            raise ValueError(f"there is no {self._kind} called {name!r}; {hint}")
        return things[name]

    def pop(self, name: str) -> T:
        thing = self.get(name)
        del self._things[name]
        return thing

    def _of_this_job(self) -> dict[str, T]:
        job = dist.group.WORLD if dist.is_initialized() else None
        if job is not self._job:
            self._job, self._things = job, {}
        return self._things
