"""Process groups by name, so that a script can make, find and destroy its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from colossalai.cluster._common import NameTable, check_ranks, destroy_group, require_job


class ProcessGroupManager:
    """Named process groups.  Every rank of the job must make the same calls in the same order."""

    def __init__(self) -> None:
        self._groups = NameTable[dist.ProcessGroup]("process group")

    def create_process_group(
        self, name: str, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup:
        """Make the group ``name`` of ``ranks``; without ``backend`` it uses that of the job.

        A rank outside of ``ranks`` makes the call too and gets ``GroupMember.NON_GROUP_MEMBER``.
        """
        require_job("create_process_group")
        self._groups.check_free(name)
        check_ranks(f"the process group {name!r}", list(ranks))
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError(
                f"the process group {name!r} cannot use nccl: this process sees no CUDA device; use backend='gloo'"
            )
        group = dist.new_group(list(ranks), backend=backend)
        self._groups.add(name, group)
        return group

    def get(self, name: str) -> dist.ProcessGroup:
        """The group called ``name``."""
        return self._groups.get(name)

    def destroy(self, name: str) -> None:
        """Destroy the group called ``name`` and forget it."""
        destroy_group(self._groups.pop(name))

    def destroy_all(self) -> None:
        """Destroy all groups of this manager."""
        for name in self._groups.names():
            self.destroy(name)
