"""Plans drawn at random, and their runs beside the serial model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.tensor_shard.options import SolverOptions
from colossalai.auto_parallel.tensor_shard.runtime import serial_masks, transform
from colossalai.auto_parallel.tensor_shard.sharded_plan import ShardedPlan
from colossalai.auto_parallel.tensor_shard.solver import InfeasibleBudgetError, solve_strategies
from colossalai.auto_parallel.tensor_shard.strategies.chosen import sharded_plan
from colossalai.auto_parallel.tensor_shard.strategies.costs import CostModel
from colossalai.auto_parallel.tensor_shard.strategies.moves import MoveCosts
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem, plan_problem
from colossalai.device import DeviceMesh
from colossalai.device.presets import DEVICES
from colossalai.fx import trace_model
from colossalai.fx.op_graph import OpGraph
from colossalai.mesh import AxisLink, Mesh, count_communication, grad_norm, serial_tensor
from colossalai.mesh.parameter import own_mesh
from colossalai.testing.parity import Problem, Tolerance

EXACT = Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9)


def links(shape: Sequence[int]) -> dict[str, AxisLink]:
    return {str(i): AxisLink(n, 1e-5, (len(shape) - i) * 1e-10) for i, n in enumerate(shape)}


def problem_of(graph: OpGraph, shape: Sequence[int], **options: Any) -> PlanProblem:
    return plan_problem(graph, CostModel(MoveCosts(links(shape)), DEVICES["cpu"]), **options)


def random_choice(problem: PlanProblem, seed: int, liveliness: float = 0.7) -> list[int]:
    """A strategy for each vertex, drawn one after the other among those that the neighbours allow; cuts are
    preferred.
    """
    draw = random.Random(seed)
    choice: list[int] = [-1] * len(problem.vertices)
    tables = [(flow.source, flow.target, problem.table(flow)) for flow in problem.flows]

    def allowed(vertex: int) -> list[int]:
        fine = []
        for number, cost in enumerate(problem.vertices[vertex].costs):
            ok = cost.seconds < float("inf")
            for source, target, table in tables:
                if source == vertex and choice[target] >= 0:
                    ok &= table[number, choice[target]] < float("inf")
                if target == vertex and choice[source] >= 0:
                    ok &= table[choice[source], number] < float("inf")
            if ok:
                fine.append(number)
        return fine

    pending = list(range(len(problem.vertices)))
    for _ in range(50 * len(pending)):
        if not pending:
            return choice
        vertex = pending.pop(0)
        fine = allowed(vertex)
        if not fine:  # its neighbours exclude each other: they choose again
            for source, target, _ in tables:
                for a, b in ((source, target), (target, source)):
                    if a == vertex and choice[b] >= 0:
                        choice[b] = -1
                        pending.append(b)
            pending.insert(0, vertex)
            draw.shuffle(pending)
            continue
        cuts = [n for n in fine if problem.vertices[vertex].placements[n].cuts]
        choice[vertex] = draw.choice(cuts if cuts and draw.random() < liveliness else fine)
    raise AssertionError("no plan was found at random")


class PlannedTraining:
    """A problem under a plan; the model computes its loss, and batches are dicts of its arguments."""

    def __init__(
        self,
        problem: Problem,
        shape: Sequence[int],
        make: Callable[[PlanProblem], list[int]],
        change: Callable[[ShardedPlan], None] | None = None,
    ) -> None:
        self.problem = problem
        model = problem.build()
        graph = trace_model(model, **problem.batches[0])
        found = problem_of(graph, shape)
        self.plan = sharded_plan(found, make(found))
        self._before = self.plan.predicted
        if change is not None:
            change(self.plan)
        device_mesh = DeviceMesh(torch.arange(prod(shape)), tuple(shape))
        self.mesh = device_mesh.mesh
        self.model = transform(model, graph, self.plan, device_mesh)
        self.optimizer = problem.optimizer(model.parameters())

    def weights(self) -> dict[str, Tensor]:
        return {n: serial_tensor(p, p, self.mesh).clone() for n, p in self.model.named_parameters()}

    def forward_backward(self, batch: Any) -> Tensor:
        state = torch.get_rng_state()
        with count_communication() as log, serial_masks():
            loss = self.problem.loss(self.model, batch)
            forward = len(log.transfers)
            loss.backward()
        torch.set_rng_state(state)  # the serial model draws the same
        for what, counted, predicted in (
            ("forward", log.transfers[:forward], self.plan.predicted.forward),
            ("backward", log.transfers[forward:], self.plan.predicted.backward),
        ):
            a, b = _bytes(counted), _bytes(predicted)
            if self.plan.predicted is self._before and self.plan.recomputed and what == "backward":
                assert sum(a.values()) > sum(b.values())  # collectives of the forward pass run again
                continue
            assert a == b, f"{what}: {a} bytes were sent, {b} predicted"
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        return {
            n: serial_tensor(p.grad, p, self.mesh).clone()
            for n, p in self.model.named_parameters()
            if p.grad is not None
        }

    def gradient_norm(self) -> Tensor:
        return grad_norm(self.model.parameters(), self.mesh)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _bytes(transfers: Iterable[Any]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for t in transfers:
        found[t.kind, t.axis] = found.get((t.kind, t.axis), 0) + t.bytes
    return dict(sorted(found.items()))


def planned(
    model: nn.Module, shape: Sequence[int], seed: int, options: SolverOptions | None = None, **batch: Any
) -> tuple[nn.Module, Mesh]:
    """``model`` under a random plan for ``batch``."""
    graph = trace_model(model, **batch)
    problem = problem_of(graph, shape, options=options)
    plan = sharded_plan(problem, random_choice(problem, seed))
    mesh = DeviceMesh(torch.arange(prod(shape)), tuple(shape)).mesh
    return transform(model, graph, plan, mesh), mesh


def check_equal(
    planned: nn.Module, serial: nn.Module, *, gradients: bool = False, rtol: float = 1e-9
) -> None:
    """The parameters and buffers of both, or the gradients, are the same."""
    theirs = dict((*serial.named_parameters(), *serial.named_buffers()))
    for name, mine in (*planned.named_parameters(), *planned.named_buffers()):
        value, other = (mine.grad, theirs[name].grad) if gradients else (mine.detach(), theirs[name].detach())
        if value is None or other is None:
            assert value is None, name
            assert other is None, name
            continue
        mesh = own_mesh(mine)
        assert mesh is not None
        whole = serial_tensor(value, mine, mesh)
        torch.testing.assert_close(whole, other, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def solved_choice(problem: PlanProblem, budget: str) -> list[int]:
    """The best plan within a budget: ``none``, ``medium``, or ``tight``, which is just above the least."""
    free = solve_strategies(problem.solver_graph)
    if budget == "none":
        return list(free.choice)
    with pytest.raises(InfeasibleBudgetError) as refused:
        solve_strategies(problem.solver_graph.with_budget(1.0))
    least = refused.value.minimum
    limit = 1.02 * least if budget == "tight" else 0.5 * (least + free.memory)
    return list(solve_strategies(problem.solver_graph.with_budget(limit)).choice)
