"""Checkpoints under a plan in which every rank holds the same state: rank 0 writes, the others wait.

The others learn how it went.  If rank 0 fails (a full disk), all ranks raise, and none goes on to wait in the next
collective for one that is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from colossalai.checkpoint_io.general import GeneralCheckpointIO


class ReplicatedCheckpointIO(GeneralCheckpointIO):
    """Saving is a collective: every rank must call it.  Loading is not: every rank reads the files for itself."""

    def run_write(self, write: Callable[[], None]) -> None:
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                write()
            except Exception as error:
                failure = error
        outcome = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(outcome, src=0)
        if failure is not None:
            raise failure
        if outcome[0] is not None:
            raise RuntimeError(f"rank 0 could not write the checkpoint: {outcome[0]}")
