"""``find_writes``: what must stay where it is, since operations write into memory that others look at.

``y.view(8, 32).add_(1)`` changes ``y``.  On pieces it still does if ``y`` and its view lie where they lie in
the serial model: a view that is moved, or cut so that it has to be copied, would take the write with it.  A
chain like that of ``relu_`` after a product has no views and may be cut like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colossalai.fx.writes import written_arguments
from colossalai.tensor.letters.calls import tensor_arguments

if TYPE_CHECKING:
    from colossalai.auto_parallel.tensor_shard.strategies.graph import PlanNode, Source


@dataclass(frozen=True)
class Writes:
    """What writes in place ask of a plan.

    Args:
        fixed: operands (operation, number) that are not moved on their way there.
        whole: operations that run on whole tensors.
        whole_results: operations whose results lie whole, however they are computed.
    """

    fixed: frozenset[tuple[str, int]] = frozenset()
    whole: frozenset[str] = frozenset()
    whole_results: frozenset[str] = frozenset()


@dataclass
class _Step:
    """What one operation does with memory."""

    name: str
    operands: list[tuple[Source, str]]
    """The operands, each with its memory."""
    written: list[int]
    """The operands that it writes to."""
    results: set[str]
    """The memory of its results."""

    @property
    def writes(self) -> set[str]:
        return {self.operands[i][1] for i in self.written}

    @property
    def shows(self) -> set[str]:
        """The memory of operands that its results show, too."""
        return self.results & {memory for _, memory in self.operands}


def find_writes(
    nodes: Mapping[str, PlanNode], results: Sequence[Source], lasting: Collection[str] = ()
) -> Writes:
    """The demands of all operations, which are given in order, and of what is handed out at the end.

    Memory that is ``lasting``, of buffers and inputs, is looked at after all of them.
    """
    steps = [_step(node) for node in nodes.values()]
    last = {memory: i for i, step in enumerate(steps) for memory in step.writes}
    if not last:
        return Writes()
    viewed = {m for i, s in enumerate(steps) for m in s.shows - s.writes if last.get(m, -1) > i}
    whole, whole_results = set(), set()
    fixed: set[tuple[str, int]] = set()
    uses: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for i, step in enumerate(steps):
        for source, memory in step.operands:
            uses[memory].append((i, source.name))
        if viewed & (step.shows | step.writes):
            whole.add(step.name)
            fixed |= {(step.name, n) for n, (_, memory) in enumerate(step.operands) if memory in viewed}
        elif viewed & step.results:
            whole_results.add(step.name)
    for source in results:
        if source.info is not None:
            uses[source.info.memory].append((len(steps), source.name))
    for i, step in enumerate(steps):
        for number in step.written:
            memory = step.operands[number][1]
            if memory in lasting or _is_seen(steps, i, uses[memory]):
                fixed.add((step.name, number))
    return Writes(frozenset(fixed), frozenset(whole), frozenset(whole_results))


def _step(node: PlanNode) -> _Step:
    operands = [
        (source, f"{source.kind} {source.name}" if source.info is None else source.info.memory)
        for source in node.operands
    ]
    into = written_arguments(node.fx_node)
    written = [i for i, a in enumerate(tensor_arguments(node.fx_node)) if a in into] if into else []
    results = {info.memory for info in node.op.outputs}
    return _Step(node.name, operands, written, results)


def _is_seen(steps: Sequence[_Step], place: int, uses: Sequence[tuple[int, str]]) -> bool:
    """Whether what step ``place`` writes is looked at later by another name than that of its result."""
    own = {steps[place].name}
    for i, name in uses:
        if i <= place:
            continue
        if name not in own:
            return True
        if i < len(steps) and any(steps[i].operands[n][0].name in own for n in steps[i].written):
            own.add(steps[i].name)
    return False
