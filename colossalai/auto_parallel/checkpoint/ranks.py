"""What the ranks of a job tell each other about their plans: what each has chosen, or why it has no plan.

Each rank tells once for each plan, also one that fails before it has begun to plan; so no rank waits for
another that has given up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist


class Told(NamedTuple):
    """What a rank tells: how its blocks look, what it has chosen for them, and its error."""

    look: Any = None
    chosen: Any = None
    error: str = ""


def dist_size() -> int:
    """How many ranks plan together."""
    together = dist.is_initialized() and dist.get_backend() != "fake"
    return dist.get_world_size() if together else 1


def tell(mine: Told) -> list[Told]:
    """What every rank tells; raises where another has an error, and this one has none."""
    if dist_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    for rank, theirs in enumerate(every):
        if theirs.error and not mine.error:
            raise ValueError(f"auto_checkpoint found no plan on rank {rank}: {theirs.error}")
    return every


def tell_error(error: Exception) -> None:
    """Let every other rank raise, too, when it tells."""
    tell(Told(error=str(error) or type(error).__name__))
