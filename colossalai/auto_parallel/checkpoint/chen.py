"""Chen's checkpointing: the chain is cut into segments that keep their inputs and are computed again as a
whole.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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


class CheckpointSolverChen(CheckpointSolverBase):
    """Cuts a chain into segments of about equal bytes, as many as give the least peak.

    Args:
        graph: a ``Chain``, or a ``torch.fx.Graph`` whose nodes know their values (``meta["val"]``).
        cnode: names of nodes of the graph that all stages may read.
        num_grids: how many numbers of segments are tried, besides a single one.
    """

    def __init__(self, graph: Any, cnode: list[str] | None = None, num_grids: int = 6) -> None:
        super().__init__(graph, -1.0, True, cnode)
        if num_grids < 1:
            raise ValueError(f"CheckpointSolverChen tries at least 1 number, got {num_grids=}")
        self.num_grids = num_grids

    def solve(self) -> Any:
        """The schedule of a ``Chain``, as a ``Sequence``; the nodes of a graph get the numbers of their
        segments as ``meta["activation_checkpoint"]``, and the graph is returned.
        """
        segments = self.segments()
        if self.stages is not None:
            regions: list[list[int]] = [[] for _ in range(len(self.chain))]
            for number, (start, end) in enumerate(segments[:-1]):  # the last is needed at once
                for stage in range(start, end):
                    regions[stage].append(number)
            self.stages.annotate(regions)
            return self.graph
        return _schedule(self.chain, segments)

    def segments(self) -> list[tuple[int, int]]:
        """The first stage of each segment, and the one behind its last."""
        return min(self.cuts(), key=lambda cut: peak_of_segments(self.chain, cut))

    def cuts(self) -> list[list[tuple[int, int]]]:
        """The segments for each number of them that is tried."""
        counts = [len(self.chain) ** (k / self.num_grids) for k in range(self.num_grids + 1)]
        return [self._cut(sum(self.chain.xbar) / count) for count in counts]

    def _cut(self, most: float) -> list[tuple[int, int]]:
        """Segments that keep ``most`` bytes or a little more."""
        cuts, inside = [0], 0
        for stage, kept in enumerate(self.chain.xbar):
            inside += kept
            if inside >= most:
                cuts.append(stage + 1)
                inside = 0
        cuts += [len(self.chain)] if cuts[-1] != len(self.chain) else []
        return list(pairwise(cuts))


def peak_of_segments(chain: Chain, segments: list[tuple[int, int]]) -> int:
    """The bytes of the inputs of all segments, and of the largest segment, whole, with its gradients."""
    inputs = [chain.x[start] for start, _ in segments[1:]]
    worst = 0
    for number, (start, end) in enumerate(segments):
        whole = sum(chain.xbar[start:end])
        besides = max(
            chain.x[i] + chain.x[i + 1] + max(chain.ftmp[i], chain.btmp[i]) for i in range(start, end)
        )
        worst = max(worst, sum(inputs[:number]) + whole + besides)
    return worst


def _schedule(chain: Chain, segments: list[tuple[int, int]]) -> Sequence:
    sequence = Sequence("Chen")
    for start, end in segments[:-1]:
        sequence.append(ForwardCheck(start))
        sequence.extend([ForwardNograd(i) for i in range(start + 1, end)])
    for number, (start, end) in enumerate(reversed(segments)):
        sequence.extend([ForwardEnable(i) for i in range(start, end)])
        if number == 0:
            sequence.append(Loss(len(chain)))
        sequence.extend([Backward(i) for i in reversed(range(start, end))])
    return sequence
