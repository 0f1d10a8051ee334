"""The order in which chunks are used: recorded in the first step, and the same on all ranks.

``AccessTrace`` records the order in which the first step uses chunks, forward and then backward.  Later steps
follow the recorded order with a position: chunks that come next are prefetched, and the chunk that is needed
last (Belady's choice) is evicted.  Where a step does something else, the position stays until the order fits
again; only speed depends on it.

``RankAgreement`` compares what the ranks ask for.  All ranks gather a shared chunk at once, and average its
gradients at once.  Ranks that take different branches would ask for different chunks, and get a mixture
without any error, or wait for each other forever.  So a number is sent ahead of every request: that of the
chunk, or of the moment at which a pass begins or ends.

[Note: rounds]
All ranks send one number in each round.  The fetches and the moments must be the same sequence on all ranks;
they are compared before anything is fetched, because gloo ends a process that gets a chunk of another size.
A rank that is to average a chunk may be alone: other ranks have skipped a part of the model, and get these
gradients later or never.  Then that round counts for nothing, the chunk waits for the end of the backward
pass, and what the other ranks have sent is kept until all ranks have come to it.  Every rank computes the
same from the same rounds, so all ranks raise the same error.

The numbers cost next to nothing where ranks communicate over the CPU.  On GPUs, where comparing means
waiting, only the first step is compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh._compat import all_gather_single
from colossalai.zero.gemini.chunk_manager import ChunkManager

NEVER = 1 << 60


class AccessTrace:
    """Records in which order one step uses chunks, by number, and follows this order in later steps."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0
        self.complete = False
        self.surprises = 0  # uses in this step that were not expected where they came
        self._places: dict[int, list[int]] = {}
        self._last_used: dict[int, int] = {}
        self._clock = 0

    def begin(self) -> None:
        """Start a step."""
        self.position = 0
        self.surprises = 0

    def visit(self, index: int) -> None:
        """Note that chunk ``index`` is used now."""
        if not self.complete:
            self._clock += 1
            self._last_used[index] = self._clock
            if not self.order or self.order[-1] != index:
                self.order.append(index)
            return
        if self.position and self.order[self.position - 1] == index:
            return
        place = self.next_use(index)
        if place is NEVER:
            self.surprises += 1
            return
        if place != self.position:
            self.surprises += 1
        self.position = place + 1

    def close(self) -> None:
        """End the step that is recorded."""
        self.complete = True
        self._places = {}
        for place, index in enumerate(self.order):
            self._places.setdefault(index, []).append(place)

    def next_use(self, index: int) -> int:
        """Return the next place in the order where this step uses ``index``, or NEVER."""
        places = self._places.get(index, [])
        at = bisect_left(places, self.position)
        return places[at] if at < len(places) else NEVER

    def first_use(self, index: int) -> int:
        """Return the place of the first use of ``index`` in a step: updates are made in this order."""
        places = self._places.get(index)
        return places[0] if places else NEVER

    def distance(self, index: int) -> int:
        """Return how far away the next use of ``index`` is, to choose what to evict; in the first step the
        least recently used goes.
        """
        if not self.complete:
            return -self._last_used.get(index, -1)
        return self.next_use(index)

    def ahead(self) -> Iterator[int]:
        """Iterate over the chunks that come next, in order."""
        return islice(self.order, self.position, None) if self.complete else iter(())


FORWARD, BACKWARD, END, AGAIN, STEP, LOOK, NOTHING, AVERAGE = range(-1, -9, -1)
MOMENTS = {
    FORWARD: "has ended its forward pass",
    BACKWARD: "begins its backward pass",
    END: "has ended its backward pass",
    AGAIN: (
        "has got a second gradient of weights whose gradients were averaged (reentrant activation"
        " checkpointing)"
    ),
    STEP: "looks at its gradients, or updates weights",
    LOOK: "looks at all weights",
}


class RankAgreement:
    """Compares what the ranks that share ``chunks`` ask for, in order."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self.asked = 0
        self._rounds: deque[tuple[Tensor, Any]] = deque()
        self._ahead: list[deque[int]] = []
        self._failure = ""

    def ask(self, number: int, is_first_step: bool) -> None:
        """Tell the other ranks that this one is about to fetch chunk ``number``, or has come to a moment."""
        if self._is_watched(is_first_step):
            self._send(number)

    def confirm(self) -> None:
        """Wait until all ranks have asked for the same as this one; raise on all ranks if one asks for
        something else.
        """
        while self._rounds or self._is_ahead:
            if not self._rounds:
                self._send(NOTHING)
            self._take_round()

    def may_reduce(self, number: int, is_first_step: bool) -> bool:
        """Return whether all ranks are about to average chunk ``number``; see [Note: rounds]."""
        if not self._is_watched(is_first_step):
            return True
        while self._rounds:
            self._take_round()
        wish = AVERAGE - number
        self._send(wish)
        return self._take_round() == [wish] * self.chunks.ranks.size

    def forget(self) -> None:
        """Drop all rounds: after an exception there is nothing to compare."""
        self._rounds.clear()
        self._ahead.clear()

    def _is_watched(self, is_first_step: bool) -> bool:
        return self.chunks.ranks.size > 1 and (self._by_cpu or is_first_step)

    @property
    def _by_cpu(self) -> bool:
        return self.chunks.ranks.staged or self.chunks.device.type == "cpu"

    @property
    def _is_ahead(self) -> bool:
        """Whether this rank has asked for something that others have not come to."""
        return bool(self._ahead) and bool(self._ahead[dist.get_rank(self.chunks.ranks.reduce)])

    def _send(self, number: int) -> None:
        if self._failure:
            raise RuntimeError(f"this model cannot be used any more, since {self._failure}; build it again")
        device = torch.device("cpu") if self._by_cpu else self.chunks.device
        own = torch.tensor([number], device=device)
        numbers = own.new_empty(self.chunks.ranks.size)
        # takes half as long as gloo's all_reduce
        work = all_gather_single(numbers, own, group=self.chunks.ranks.reduce, async_op=True)
        self._rounds.append((numbers, work))
        self.asked += 1

    def _take_round(self) -> list[int]:
        numbers, work = self._rounds.popleft()
        work.wait()
        found: list[int] = numbers.tolist()
        self._ahead = self._ahead or [deque() for _ in found]
        for ahead, number in zip(self._ahead, found, strict=True):
            if number > NOTHING:
                ahead.append(number)
        while all(self._ahead):
            self._compare([ahead.popleft() for ahead in self._ahead])
        return found

    def _compare(self, numbers: list[int]) -> None:
        mine = numbers[dist.get_rank(self.chunks.ranks.reduce)]
        other = next((number for number in numbers if number != mine), mine)
        if other == mine:
            return
        self.forget()
        self._failure = f"one rank {self._what(mine)} while another {self._what(other)}"
        raise RuntimeError(
            f"ranks that share chunks must use them in the same order, but this one {self._what(mine)} while"
            f" another {self._what(other)}; with branches that not all ranks take (experts without tokens),"
            " use strict_ddp_mode=True, which brings all weights before the forward pass, or ZeRO stage 2"
        )

    def _what(self, number: int) -> str:
        return MOMENTS.get(number) or f"needs {self.chunks.chunks[number].name}"
