"""Do all ranks bring the same chunk?

A chunk that ranks share is put together by all of them at once.  Ranks that take different branches would ask for different chunks, and
get a mixture without any error, or wait for each other forever.  So a number travels with every request: that of the chunk, or of the moment
at which a pass begins and ends.  It is compared before anybody computes with what came.

The numbers cost next to nothing where ranks talk over the CPU.  On GPUs, where comparing means waiting, only the first step is watched.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh._compat import all_gather_single
from colossalai.zero.gemini.chunk_manager import ChunkManager

BACKWARD, END = -1, -2
MOMENTS = {BACKWARD: "begins its backward pass", END: "has ended its backward pass"}


class Agreement:
    """What the ranks of ``chunks`` ask for, in order."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self._asked: deque[tuple[int, Tensor, Any]] = deque()

    def ask(self, number: int, is_first_step: bool) -> None:
        """This rank is about to bring chunk ``number``, or has come to a moment."""
        ranks = self.chunks.ranks
        by_cpu = ranks.staged or self.chunks.device.type == "cpu"
        if ranks.size == 1 or not (by_cpu or is_first_step):
            return
        device = torch.device("cpu") if by_cpu else self.chunks.device
        own = torch.tensor([number], device=device)
        numbers = own.new_empty(ranks.size)
        # takes half as long as gloo's all_reduce
        work = all_gather_single(numbers, own, group=ranks.gather, async_op=True)
        self._asked.append((number, numbers, work))

    def confirm(self) -> None:
        """Wait for what the others have asked for; an error on all ranks if that is something else."""
        while self._asked:
            mine, numbers, work = self._asked.popleft()
            work.wait()
            other = next((number for number in numbers.tolist() if number != mine), mine)
            if other == mine:
                continue
            self._give_up()
            raise RuntimeError(
                f"ranks that share chunks must use them in the same order, but this one {self._what(mine)} while another"
                f" {self._what(other)}; with branches that not all ranks take (experts without tokens), use strict_ddp_mode=True,"
                " which brings all weights before the forward pass, or ZeRO stage 2"
            )

    def _give_up(self) -> None:
        """What is on its way may never come, but may still write: its memory is kept, and nobody waits for it."""
        self._asked.clear()
        for chunk in self.chunks.chunks:
            if chunk.arriving is not None:
                chunk.users.add(self)
                chunk.arriving = None

    def forget(self) -> None:
        """After an exception nobody compares any more."""
        self._asked.clear()

    def _what(self, number: int) -> str:
        return MOMENTS.get(number) or f"needs {self.chunks.chunks[number].name}"
