"""Rotor: the fastest schedule of a chain within a budget, of all those that free no checkpoint before its
use.

For each part of the chain, stages s to t, and each number of memory slots there is the least time of its
forward and backward passes, when the input of s is kept elsewhere and the gradient of t's output is there:
either stage s keeps all that it needs, or some later input is kept and everything before it is computed a
second time.  All numbers of slots are one vector, so one pass gives the whole curve from budgets to times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colossalai.auto_parallel.checkpoint.operation import (
    Backward,
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
)
from colossalai.auto_parallel.checkpoint.solver_base import CheckpointSolverBase


class CheckpointSolverRotor(CheckpointSolverBase):
    """Finds the optimal persistent schedule of a chain.

    Args:
        graph: a ``Chain``, or a ``torch.fx.Graph`` whose nodes know their values (``meta["val"]``).
        free_memory: bytes for activations and gradients; -1 for as much as is needed.
        cnode: names of nodes of the graph that all stages may read, such as a mask.
        memory_slots: in how many parts memory is divided; sizes are rounded up to whole parts.
        optim_multiplier: of parameters, how many times their bytes the optimizer takes of ``free_memory``.
    """

    def __init__(
        self,
        graph: Any,
        free_memory: float = -1,
        cnode: list[str] | None = None,
        memory_slots: int = 500,
        optim_multiplier: float = 1.0,
    ) -> None:
        super().__init__(graph, free_memory, True, cnode, optim_multiplier)
        if memory_slots < 1:
            raise ValueError(f"CheckpointSolverRotor needs at least 1 memory slot, got {memory_slots=}")
        self.memory_slots = memory_slots
        self.sequence: Sequence | None = None
        self._table: _Table | None = None

    def solve(self, force_python: bool = False, verbose: bool = False) -> Any:
        """The schedule of a ``Chain``, as a ``Sequence``; the nodes of a graph get the numbers of their
        regions as ``meta["activation_checkpoint"]``, and the graph is returned.

        ``force_python`` is accepted and has no use: there is one implementation.
        """
        table = self._solved()
        if not np.isfinite(table.times()[-1]):
            raise ValueError(
                f"CheckpointSolverRotor: no schedule fits into {self.budget} bytes; the least that one needs"
                f" is about {self.least_memory()}"
            )
        self.sequence = Sequence("Rotor")
        table.schedule(0, len(self.chain) - 1, table.slots, self.sequence, is_last=True)
        if verbose:
            self.print_chain()
            self.print_sequence()
        if self.stages is None:
            return self.sequence
        self.stages.annotate(regions_of(self.sequence, len(self.chain)))
        return self.graph

    def curve(self) -> list[tuple[int, float]]:
        """Budgets up to ``free_memory`` at which the time falls, with these times."""
        table = self._solved()
        times = np.concatenate([[np.inf], table.times()])
        falls = np.flatnonzero(times[1:] < times[:-1])
        return [(int(slot) * table.unit, float(times[slot + 1])) for slot in falls]

    def least_memory(self) -> int:
        """The smallest budget for which there is a schedule."""
        unlimited = _Table(self.chain, self.memory_slots, self.whole_memory())
        return int(np.flatnonzero(np.isfinite(unlimited.times()))[0]) * unlimited.unit

    def whole_memory(self) -> int:
        """Enough bytes to keep everything, also when each size is rounded up to whole slots."""
        c = self.chain
        most = sum(c.xbar) + max(c.ftmp) + max(c.btmp) + 2 * max(c.x)
        rounding = most // self.memory_slots  # of each size
        return int(most + (len(c) + 4) * rounding)

    def print_chain(self) -> None:
        for i in range(len(self.chain)):
            print(
                f"stage {i}: forward {self.chain.ftime[i]:.3g}, backward {self.chain.btime[i]:.3g}, input"
                f" {self.chain.x[i]}, kept {self.chain.xbar[i]}"
            )

    def print_sequence(self) -> None:
        print(self.sequence)

    def _solved(self) -> _Table:
        if self._table is None:
            self._table = _Table(self.chain, self.memory_slots, self.budget or self.whole_memory())
        return self._table


class _Table:
    """The least time of every part of a chain for every number of slots."""

    def __init__(self, chain: Chain, memory_slots: int, budget: int) -> None:
        self.chain = chain
        self.unit = max(1, -(-budget // memory_slots))
        self.slots = budget // self.unit
        self._x, self._xbar, self._ftmp, self._btmp = (
            [-(-int(size) // self.unit) for size in sizes]
            for sizes in (chain.x, chain.xbar, chain.ftmp, chain.btmp)
        )
        self._until = np.concatenate([[0.0], np.cumsum(chain.ftime)])  # times of all stages before one
        self._time: dict[tuple[int, int], np.ndarray] = {}
        for length in range(len(chain)):
            for first in range(len(chain) - length):
                options = self._options(first, first + length)
                self._time[first, first + length] = np.minimum.reduce([time for _, time in options])

    def times(self) -> np.ndarray:
        return self._time[0, len(self.chain) - 1]

    def _options(self, s: int, t: int) -> list[tuple[int, np.ndarray]]:
        """The times of the ways to compute stages s to t: -1 for keeping all of s, else the stage whose input
        is kept.
        """
        chain = self.chain
        own = chain.ftime[s] + chain.btime[s]
        gradients = self._x[s + 1] + self._x[s] + self._btmp[s]
        need = self._xbar[s] + max(self._x[t + 1] + self._ftmp[s], gradients)
        if s == t:
            return [(-1, times_from(need, np.full(self.slots + 1, float(own))))]
        found = [(-1, times_from(need, own + times_less(self._time[s + 1, t], self._xbar[s])))]
        for kept in range(s + 1, t + 1):
            ahead = self._until[kept] - self._until[s]
            time = ahead + times_less(self._time[kept, t], self._x[kept]) + self._time[s, kept - 1]
            found.append((kept, times_from(self._pass(s, kept, t), time)))
        return found

    def _pass(self, s: int, kept: int, t: int) -> int:
        """Slots to compute stages s to ``kept`` - 1 without keeping anything."""
        first = self._x[s + 1] + self._ftmp[s]
        others = [self._x[j] + self._x[j + 1] + self._ftmp[j] for j in range(s + 1, kept)]
        return self._x[t + 1] + max([first, *others])

    def schedule(self, s: int, t: int, slots: int, sequence: Sequence, is_last: bool = False) -> None:
        """Append the operations of the fastest way to compute stages s to t."""
        kept, _ = min(self._options(s, t), key=lambda option: float(option[1][slots]))
        if kept < 0:
            sequence.append(ForwardEnable(s))
            if s < t:
                self.schedule(s + 1, t, slots - self._xbar[s], sequence, is_last)
            elif is_last:
                sequence.append(Loss(t + 1))
            sequence.append(Backward(s))
            return
        sequence.append(ForwardCheck(s))
        sequence.extend([ForwardNograd(j) for j in range(s + 1, kept)])
        self.schedule(kept, t, slots - self._x[kept], sequence, is_last)
        self.schedule(s, kept - 1, slots, sequence)


def times_from(need: int, time: np.ndarray) -> np.ndarray:
    """``time``, where there are fewer slots than needed infinite."""
    time = time.copy()
    time[: max(0, need)] = np.inf
    return time


def times_less(time: np.ndarray, slots: int) -> np.ndarray:
    """Times where so many slots are taken already."""
    shifted = np.full_like(time, np.inf)
    if slots < len(time):
        shifted[slots:] = time[: len(time) - slots]
    return shifted


def regions_of(sequence: Sequence, stages: int) -> list[list[int]]:
    """For each stage, the numbers of the nested regions around it that are computed again, outermost first.

    A region begins with a stage that keeps its input, and goes on with those that keep nothing.
    """
    regions: list[list[int]] = [[] for _ in range(stages)]
    number = -1
    for operation in sequence:
        if isinstance(operation, ForwardCheck):
            number += 1
        if isinstance(operation, (ForwardCheck, ForwardNograd)):
            regions[operation.index].append(number)
    return regions
