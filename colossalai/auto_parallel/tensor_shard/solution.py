"""``Solution``: the strategies that were chosen, as lines, as a table with reasons, and as a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from colossalai.auto_parallel.tensor_shard.picture import draw_solution
from colossalai.auto_parallel.tensor_shard.recompute import Segment, peak_memory, segments_of_names
from colossalai.auto_parallel.tensor_shard.sharded_plan import PredictedStep, ShardedPlan
from colossalai.auto_parallel.tensor_shard.solver import ChoiceReason, StrategyPlan
from colossalai.auto_parallel.tensor_shard.strategies.chosen import (
    flow_transfers,
    gathered_parameters,
    sharded_plan,
)
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem
from colossalai.fx import OpGraph
from colossalai.fx.nodes import target_name

_FORMAT = 1


def graph_fingerprint(graph: OpGraph) -> str:
    """A short text that two traces have alike only if their operations, shapes and parameters are."""
    digest = hashlib.sha256()
    for node in graph.module.graph.nodes:
        shapes = (
            [(o.shape, str(o.dtype)) for o in graph.nodes[node.name].outputs]
            if node.name in graph.nodes
            else ""
        )
        digest.update(
            repr((node.op, node.name, target_name(node), str(node.args), str(node.kwargs), shapes)).encode()
        )
    for name, info in sorted(graph.parameters.items()):
        digest.update(repr((name, info.shape, str(info.dtype), info.requires_grad)).encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class SolutionRow:
    """Why one operation runs as it does.

    Args:
        seconds: of its kernels, its own collectives and the conversions of its operands, in a step.
        sent: bytes that a rank sends for it.
        extra: how many seconds more the whole plan takes with the runner-up; None if there is none.
    """

    operation: str
    strategy: str
    why: str
    seconds: float
    sent: float
    runner_up: str | None
    extra: float | None


class Solution(list[str]):
    """A line ``"{node} {strategy}"`` for each operation; printed, it is a table with the reasons.

    Args:
        plan: the answer of the solver: its cost, bound and gap.
        sharded: the layouts of all tensors, and what a step is expected to take.
        recomputed: the operations that run again in the backward pass.
    """

    def __init__(self, problem: PlanProblem, plan: StrategyPlan, recomputed: Sequence[Segment] = ()) -> None:
        self.problem, self.plan, self.recomputed = problem, plan, tuple(recomputed)
        self.fingerprint = graph_fingerprint(problem.graph.graph)
        self.sharded: ShardedPlan = sharded_plan(problem, plan.choice, self.fingerprint)
        if recomputed:
            self.sharded.recomputed = tuple(segment.names for segment in recomputed)
            self.sharded.predicted = _with_segments(self.sharded.predicted, recomputed)
        chosen = zip(problem.vertices, plan.choice, strict=True)
        super().__init__(f"{v.title} {v.placements[c].name}" for v, c in chosen if v.kind == "node")

    @property
    def strategies(self) -> dict[str, str]:
        """The strategy of everything that chooses, operations and others, by kind and name."""
        chosen = zip(self.problem.vertices, self.plan.choice, strict=True)
        return {f"{v.kind} {v.name}": v.placements[c].name for v, c in chosen}

    @property
    def rows(self) -> list[SolutionRow]:
        """The table, without operations on constants, which every rank does."""
        moved = [0.0] * len(self.problem.vertices)
        sent = [0.0] * len(self.problem.vertices)
        choice = self.plan.choice
        for flow, edge in zip(self.problem.flows, self.problem.solver_graph.edges, strict=True):
            moved[flow.target] += float(edge.cost[choice[flow.source], choice[flow.target]])
            there, back = flow_transfers(self.problem, flow, choice)
            sent[flow.target] += sum(t.sent for t in (*there, *back))
        rows = []
        for i, (vertex, reason) in enumerate(zip(self.problem.vertices, self.plan.reasons, strict=True)):
            if vertex.node is None or vertex.node.why_whole.startswith("made of"):
                continue
            cost = vertex.costs[choice[i]]
            own = sum(t.sent for t in (*cost.forward, *cost.backward))
            rows.append(
                SolutionRow(
                    operation=vertex.title,
                    strategy=reason.strategy,
                    why=self._why(i, reason),
                    seconds=cost.seconds + moved[i],
                    sent=own + sent[i],
                    runner_up=reason.runner_up,
                    extra=None if reason.runner_up is None else reason.extra,
                )
            )
        return rows

    def _why(self, i: int, reason: ChoiceReason) -> str:
        node = self.problem.vertices[i].node
        if reason.runner_up is None:
            return (node.why_whole if node is not None else "") or "no other cut is possible"
        if reason.extra < -1e-6 * self.plan.cost:
            return "the budget"  # the runner-up is faster, and needs more memory
        costs, chosen = self.plan.graph.nodes[i].cost, self.plan.choice[i]
        if costs[chosen] <= costs.min() * (1 + 1e-9):
            return "cheapest by itself"
        return "saves conversions"

    def __str__(self) -> str:
        table = [("operation", "strategy", "why", "ms", "MB sent", "runner-up", "ms more")]
        for row in self.rows:
            extra = "" if row.extra is None else f"{row.extra * 1e3:+.3f}"
            numbers = f"{row.seconds * 1e3:.3f}", f"{row.sent / 1e6:.3f}"
            table.append((row.operation, row.strategy, row.why, *numbers, row.runner_up or "", extra))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        step, mesh = self.sharded.predicted, " x ".join(map(str, self.sharded.axes.values()))
        seconds = step.compute + step.communication
        lines = [
            f"mesh {mesh}: {seconds * 1e3:.4g} ms a step ({step.compute * 1e3:.4g} computing,"
            f" {step.communication * 1e3:.4g} communicating), {step.memory / 2**30:.4g} GiB;"
            f" no plan costs less than {self.plan.lower_bound * 1e3:.4g} ms (gap {self.plan.gap:.1e})"
        ]
        if self.recomputed:
            taken = sum(segment.seconds for segment in self.recomputed) * 1e3
            count = sum(len(segment.names) for segment in self.recomputed)
            lines.append(
                f"{count} operations in {len(self.recomputed)} segments run again in the backward pass,"
                f" which takes {taken:.4g} ms of it; the bound is that of plans without recomputation"
            )
        if gathered := gathered_parameters(self.problem, self.plan.choice):
            first = ", ".join(f"{name} as {rest}" for name, rest in list(gathered.items())[:3])
            lines.append(
                f"{len(gathered)} parameters rest cut and are gathered when they are used: {first}"
                + (", ..." if len(gathered) > 3 else "")
            )
        lines += [
            f"{name} runs whole on every rank: {why}" for name, why in self.problem.whole_operations.items()
        ]
        return lines

    def draw(self, path: str | Path) -> None:
        """Write a picture of the operations with their cuts, and of what each conversion costs, to a file."""
        draw_solution(self, path)

    def save(self, path: str | Path) -> None:
        """Write the strategies to a file, which :func:`load_solution` reads."""
        content = {
            "format": _FORMAT,
            "model": self.fingerprint,
            "mesh": list(self.sharded.axes.values()),
            "seconds": self.plan.cost,
            "strategies": self.strategies,
            "recomputed": self.sharded.recomputed,
        }
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _with_segments(step: PredictedStep, recomputed: Sequence[Segment]) -> PredictedStep:
    again = [t for segment in recomputed for t in segment.transfers]
    compute = sum(segment.compute for segment in recomputed)
    return replace(
        step,
        compute=step.compute + compute,
        communication=step.communication + sum(s.seconds for s in recomputed) - compute,
        memory=int(peak_memory(step.memory, recomputed)),
        backward=(*step.backward, *again),
    )


def load_solution(path: str | Path, problem: PlanProblem) -> Solution:
    """The solution that a file holds; refuses a file of another model or another mesh."""
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        model, mesh, names = content["model"], content["mesh"], content["strategies"]
    except FileNotFoundError:
        raise ValueError(f"solver_solution_path={str(path)!r}: there is no such file") from None
    except (KeyError, TypeError, ValueError) as failed:
        raise ValueError(f"solver_solution_path={str(path)!r} holds no solution: {failed}") from None
    ours = list(problem.model.axes.values())
    if mesh != ours:
        raise ValueError(
            f"the solution in {str(path)!r} is for a mesh of shape {mesh}, and this one has {ours}"
        )
    if model != graph_fingerprint(problem.graph.graph):
        raise ValueError(
            f"the solution in {str(path)!r} is that of another model, or of other inputs: its operations,"
            " shapes or parameters are not these; solve again, without load_solver_solution"
        )
    choice = choice_of_names(names, problem, f"the solution in {str(path)!r}")
    groups = content.get("recomputed", ())
    return Solution(problem, plan_of_choice(problem, choice), segments_of_names(problem, choice, groups))


def choice_of_names(names: dict[str, str], problem: PlanProblem, what: str) -> tuple[int, ...]:
    """The number of the named strategy of every vertex."""
    choice = []
    for vertex in problem.vertices:
        known = [placement.name for placement in vertex.placements]
        wanted = names.get(f"{vertex.kind} {vertex.name}")
        if wanted not in known:
            raise ValueError(
                f"{what} gives {vertex.title!r} the strategy {wanted!r}, which it does not have under these"
                f" options; it has {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
            )
        choice.append(known.index(wanted))
    return tuple(choice)


def plan_of_choice(problem: PlanProblem, choice: Sequence[int]) -> StrategyPlan:
    """A plan that was not searched for, so without a bound of its own."""
    graph = problem.solver_graph
    cost = graph.cost(choice)
    if not np.isfinite(cost):
        raise ValueError("this solution needs a conversion that is not possible under these options")
    return StrategyPlan(graph, tuple(choice), cost, graph.memory(choice), 0.0, "given")
