"""The second stage of a search: which operations run again in the backward pass, so that less is kept.

A plan says how every operation is cut; what that leaves in memory may still be too much.  The graph falls
into segments between places that one activation alone passes (in a transformer the residual stream, twice in
a layer).  A segment that is recomputed keeps only what comes in.  :func:`plan_with_recomputation` looks at
plans under several budgets, from the given one up: a faster plan that needs more memory, with some segments
recomputed, may beat the best plan that fits as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from colossalai.auto_parallel.tensor_shard.runtime.program import changes_buffers
from colossalai.auto_parallel.tensor_shard.solver import InfeasibleBudgetError, StrategyPlan, solve_strategies
from colossalai.auto_parallel.tensor_shard.strategies.chosen import flow_transfers
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem
from colossalai.fx.costs import SWITCHES
from colossalai.fx.op_graph import OpGraph
from colossalai.mesh.collectives import Transfer

_BUDGETS = 6
_SMALLEST = 3  # operations in a segment


@dataclass(frozen=True)
class Segment:
    """Neighbouring operations, what they take once more, and what they need not keep.

    Args:
        names: of the ``fx`` nodes, in order.
        compute: seconds of the kernels that run again: those up to the last that keeps something.
        transfers: the collectives that run again.
        seconds: of both.
        freed: bytes that are not kept.
    """

    names: tuple[str, ...]
    compute: float
    transfers: tuple[Transfer, ...]
    seconds: float
    freed: int


def plan_with_recomputation(
    problem: PlanProblem, memory_budget: float | None, **search: Any
) -> tuple[StrategyPlan, tuple[Segment, ...]]:
    """The fastest plan that is found with the segments that it recomputes.

    ``search`` are options of :func:`solve_strategies`; each of the plans that are compared is searched for to
    within 1 %, or for 10 seconds, unless it says otherwise.

    Raises:
        InfeasibleBudgetError: also with all segments recomputed, no plan that was looked at fits.
    """
    search = {"gap": 1e-2, "time_limit": 10.0, **search}
    graph = problem.solver_graph
    free = solve_strategies(graph, **search)
    if memory_budget is None or free.memory <= memory_budget:
        return (free if memory_budget is None else _within(free, memory_budget)), ()
    least = sum(float(node.memory.min()) for node in graph.nodes)
    lowest = max(memory_budget, least)
    best: tuple[float, StrategyPlan, tuple[Segment, ...]] | None = None
    minimum = float("inf")
    for step in range(_BUDGETS):
        limit = lowest + (free.memory - lowest) * step / (_BUDGETS - 1)
        try:
            plan = solve_strategies(graph.with_budget(limit), **search)
        except InfeasibleBudgetError as refused:
            minimum, plan = refused.minimum, solve_strategies(graph.with_budget(refused.minimum), **search)
        found = segments(problem, plan.choice)
        minimum = min(minimum, peak_memory(plan.memory, _all_useful(found)))
        chosen = _cheapest_cover(found, plan.memory - memory_budget)
        if chosen is not None:
            total = plan.cost + sum(segment.seconds for segment in chosen)
            if best is None or total < best[0]:
                best = total, plan, chosen
    if best is None:
        raise InfeasibleBudgetError(memory_budget, minimum)
    return _within(best[1], memory_budget), best[2]


def segments_of_names(
    problem: PlanProblem, choice: Sequence[int], groups: Sequence[Sequence[str]]
) -> tuple[Segment, ...]:
    """The segments of these operations."""
    return tuple(_segment(problem, choice, names) for names in groups)


def _within(plan: StrategyPlan, memory_budget: float) -> StrategyPlan:
    return replace(plan, graph=plan.graph.with_budget(memory_budget))


def segments(problem: PlanProblem, choice: Sequence[int]) -> list[Segment]:
    """The segments of a plan that recomputing would free memory of."""
    return [s for names in _runs(problem) if (s := _segment(problem, choice, names)).freed > 0]


def _runs(problem: PlanProblem) -> list[list[str]]:
    """The operations between places that one activation alone passes, with what stands between them; runs
    that change buffers or hand out results are left out.
    """
    graph = problem.graph.graph
    nodes = list(graph.module.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    learning = [
        vertex.node.fx_node
        for vertex in problem.vertices
        if vertex.node is not None and any(o.requires_grad for o in vertex.node.op.outputs)
    ]
    outputs = set(graph.module.graph.find_nodes(op="output")[0].all_input_nodes)
    runs: list[list[str]] = []
    alive: dict[fx.Node, int] = {}
    begin, count = None, 0
    for node in learning:
        begin, count = order[node] if begin is None else begin, count + 1
        alive = {n: end for n, end in alive.items() if end > order[node]}
        alive[node] = _last_use(node, order)
        if len(alive) == 1 and count >= _SMALLEST:
            run = [n for n in nodes[begin : order[node] + 1] if n.op not in ("get_attr", "placeholder")]
            if not outputs.intersection(run) and not any(_stays(graph, n) for n in run):
                runs.append([n.name for n in run])
            begin, count = None, 0
    return runs


def _last_use(node: fx.Node, order: dict[fx.Node, int]) -> int:
    users = [u for user in node.users for u in (user.users if _picks(user) else (user,))]
    return max((order[user] for user in users), default=order[node])


def _picks(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _stays(graph: OpGraph, node: fx.Node) -> bool:
    """Whether an operation must run once: it changes a buffer, or a mode."""
    return node.target in SWITCHES or changes_buffers(graph, node)


def _segment(problem: PlanProblem, choice: Sequence[int], names: Sequence[str]) -> Segment:
    again, last = _run_again(problem, names)
    compute, transfers = 0.0, list[Transfer]()
    for vertex, number in zip(problem.vertices, choice, strict=True):
        if vertex.kind == "node" and vertex.name in again:
            cost = vertex.costs[number]
            compute += cost.compute.fwd
            sums = cost.ending if vertex.name == last else 0
            transfers += cost.forward[: len(cost.forward) - sums]
    for flow in problem.flows:
        target = problem.vertices[flow.target]
        if target.kind == "node" and target.name in again and not flow.twice:  # which is moved again as it is
            transfers += flow_transfers(problem, flow, choice)[0]
    seconds = compute + problem.model.moves.time(transfers)
    return Segment(tuple(names), compute, tuple(transfers), seconds, _freed(problem, choice, set(names)))


def _run_again(problem: PlanProblem, names: Sequence[str]) -> tuple[set[str], str]:
    """The operations of a segment up to the last that keeps something, where torch stops, and this one."""
    nodes = problem.graph.nodes
    saving = [n for n in names if n in nodes and (nodes[n].op.saved or nodes[n].op.saved_parameters)]
    keep = [n for n in saving if any(nodes[n].learns)]
    if not keep:
        return set(), ""
    return set(names[: names.index(keep[-1]) + 1]), keep[-1]


def _freed(problem: PlanProblem, choice: Sequence[int], inside: set[str]) -> int:
    """What is kept for operations of a segment alone, less what comes in and would not be kept otherwise."""
    kept: dict[str, tuple[str, int]] = {}  # memory: the operation that is charged for it, and bytes
    made: dict[str, str] = {}  # memory: the operation that makes it
    for vertex, number in zip(problem.vertices, choice, strict=True):
        if vertex.node is None:
            continue
        for name, nbytes in zip(vertex.charged, vertex.costs[number].kept, strict=True):
            kept[name] = vertex.name, nbytes
        for output in vertex.node.op.outputs:
            made.setdefault(output.memory, vertex.name)
    leaving, coming = set[str](), dict[str, int]()
    for flow in problem.flows:
        source, target = problem.vertices[flow.source], problem.vertices[flow.target]
        from_inside, to_inside = source.name in inside, target.name in inside
        if from_inside and not to_inside:
            leaving.add(flow.info.memory)
        elif to_inside and not from_inside and flow.learns and source.kind == "node":
            layout = source.placements[choice[flow.source]].outputs[flow.index]
            coming[flow.info.memory] = flow.info.nbytes // problem.model.parts(layout)
    freed = sum(
        nbytes
        for name, (owner, nbytes) in kept.items()
        if owner in inside and name not in leaving and (made.get(name, owner) in inside)
    )
    return freed - sum(nbytes for name, nbytes in coming.items() if name not in kept)


def peak_memory(memory: float, chosen: Sequence[Segment]) -> float:
    """What is needed at most: while a segment is recomputed, its own tensors are there."""
    return memory - sum(s.freed for s in chosen) + max((s.freed for s in chosen), default=0)


def _all_useful(found: Sequence[Segment]) -> list[Segment]:
    return list(found) if len(found) > 1 else []


def _cheapest_cover(found: Sequence[Segment], excess: float) -> tuple[Segment, ...] | None:
    """Segments that free ``excess`` bytes and the room in which one of them runs again, for little time; None
    if all together free too little.
    """
    if excess <= 0:
        return ()
    best: tuple[Segment, ...] | None = None
    for room in sorted({segment.freed for segment in found}):
        chosen, freed = list[Segment](), 0
        for segment in sorted((s for s in found if s.freed <= room), key=lambda s: s.seconds / s.freed):
            if freed < excess + room:
                chosen.append(segment)
                freed += segment.freed
        for segment in sorted(chosen, key=lambda s: -s.seconds):  # what turned out not to be needed
            if freed - segment.freed >= excess + room:
                chosen.remove(segment)
                freed -= segment.freed
        if freed >= excess + room and (best is None or _time(chosen) < _time(best)):
            best = tuple(sorted(chosen, key=lambda s: found.index(s)))
    return best


def _time(chosen: Sequence[Segment]) -> float:
    return sum(segment.seconds for segment in chosen)
