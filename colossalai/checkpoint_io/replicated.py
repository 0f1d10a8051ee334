"""Checkpoints under a plan in which every rank holds the same state: rank 0 writes, the others wait.

The others learn how it went.  If rank 0 fails (a full disk), all ranks raise, and none goes on to wait in the next
collective for one that is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from colossalai.checkpoint_io.general import GeneralCheckpointIO
from colossalai.checkpoint_io.ranks import Ranks


class ReplicatedCheckpointIO(GeneralCheckpointIO):
    """Saving is a collective: every rank must call it.  Loading is not: every rank reads the files for itself.

    ``group`` holds the ranks that take part, by default all; its first rank is the one that writes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.group)

    @property
    def is_writer(self) -> bool:
        return self.ranks.rank == 0

    def run_write(self, write: Callable[[], None]) -> None:
        failure: Exception | None = None
        if self.is_writer:
            try:
                write()
            except Exception as error:
                failure = error
        self.agree(failure)

    def agree(self, failure: Exception | None) -> None:
        """Raise on all ranks what failed on rank 0, if anything did."""
        self.ranks.agree(failure, what="write the checkpoint")
