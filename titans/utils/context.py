"""One rank goes first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colossalai.cluster import DistCoordinator
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


@contextmanager
def barrier_context(
    executor_rank: int = 0, parallel_mode: ParallelMode = ParallelMode.GLOBAL
) -> Iterator[None]:
    """Let ``executor_rank`` of the group of ``parallel_mode`` run the block first, then all others.

    For example to download a data set once: the others find it in place.
    """
    with DistCoordinator().priority_execution(executor_rank, gpc.get_group(parallel_mode)):
        yield
