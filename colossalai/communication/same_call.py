"""Compares the calls of the ranks of a ``ParallelMode`` before their tensors travel.

Tensors of different shapes, dtypes or calls would leave mixed values, wait for ever or end the process; a
rank that refuses its own tensor would leave the others waiting.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh.agreement import can_compare

# of one rank's words: a size that all ranks know, so that one gather is enough
_BYTES = 512
_REFUSED = "refused: "


class SameCall:
    """One small gather of what the ranks of ``mode`` call; ``check`` waits for it and refuses differences."""

    def __init__(self, name: str, tensor: Tensor, mode: ParallelMode, **arguments: object) -> None:
        self._mode = mode
        words = "".join(f", {key}={value}" for key, value in arguments.items())
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._call = f"{name}({dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}{words})"
        self._compares = gpc.get_world_size(mode) > 1 and can_compare(tensor)

    def tell(self, problem: Exception | None) -> None:
        """Start the gather; with a ``problem`` of this rank's own, end it and raise that on this rank."""
        if self._compares:
            text = self._call if problem is None else f"{_REFUSED}{problem}"
            own = torch.zeros(_BYTES, dtype=torch.uint8)
            said = text.encode()[:_BYTES]
            own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            self._told = [torch.empty_like(own) for _ in gpc.get_ranks_in_group(self._mode)]
            self._work = dist.all_gather(self._told, own, group=gpc.get_cpu_group(self._mode), async_op=True)
        if problem is not None:
            if self._compares:
                self._work.wait()
            raise problem

    def check(self) -> None:
        """Refuse calls that differ, on every rank."""
        if not self._compares:
            return
        self._work.wait()
        ranks = gpc.get_ranks_in_group(self._mode)
        said = [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in self._told]
        for rank, text in zip(ranks, said, strict=True):
            if text.startswith(_REFUSED):
                raise RuntimeError(
                    f"colossalai.communication: rank {rank} of {self._mode} refused its part of"
                    f" {self._call}: {text.removeprefix(_REFUSED)}"
                )
        if len(set(said)) > 1:
            calls = ", ".join(f"rank {rank} {text}" for rank, text in zip(ranks, said, strict=True))
            raise ValueError(
                f"colossalai.communication: the ranks of {self._mode} make different calls: {calls}; make the"
                " same call on all of them, with tensors of one shape and dtype"
            )
