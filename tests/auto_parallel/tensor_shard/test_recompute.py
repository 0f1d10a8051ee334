"""Segments that run again in the backward pass: what they save, and that nothing else changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import solve_solution
from colossalai.auto_parallel.tensor_shard.recompute import (
    peak_memory,
    plan_with_recomputation,
    segments,
)
from colossalai.auto_parallel.tensor_shard.sharded_plan import ShardedPlan
from colossalai.auto_parallel.tensor_shard.solution import Solution, load_solution, plan_of_choice
from colossalai.auto_parallel.tensor_shard.solver import InfeasibleBudgetError, solve_strategies
from colossalai.auto_parallel.tensor_shard.strategies.problem import PlanProblem
from colossalai.testing import parametrize_sample, spawn
from colossalai.testing.parity import Tolerance, check_plan
from tests.auto_parallel.tensor_shard.planning import constructor, grid, large_problem
from tests.auto_parallel.tensor_shard.random_plans import PlannedTraining, random_choice
from tests.auto_parallel.tensor_shard.small_models import small_problem


def test_segments_of_a_transformer_lie_between_places_of_the_residual_stream() -> None:
    problem = large_problem(2, grid(2, 2))
    found = segments(problem, solve_strategies(problem.solver_graph).choice)
    ends = [segment.names[-1] for segment in found]
    assert ends[:4] == [
        "add_4",
        "add_7",
        "add_8",
        "add_11",
    ]  # after attention and after the MLP of each layer
    assert all(segment.freed > 0 and segment.seconds > 0 for segment in found)
    names = [name for segment in found for name in segment.names]
    assert len(names) == len(set(names))


def test_recomputing_is_chosen_where_it_is_faster_than_cutting_more() -> None:
    problem = large_problem(2, grid(2, 2))
    free = solve_strategies(problem.solver_graph)
    budget = 0.7 * free.memory
    alone = solve_strategies(problem.solver_graph.with_budget(budget), gap=1e-2)
    plan, chosen = plan_with_recomputation(problem, budget)
    assert chosen
    assert peak_memory(plan.memory, chosen) <= budget
    assert plan.cost + sum(segment.seconds for segment in chosen) < alone.cost
    step = Solution(problem, plan, chosen).sharded.predicted
    assert step.memory <= budget
    assert step.compute + step.communication == pytest.approx(plan.cost + sum(s.seconds for s in chosen))
    assert plan_with_recomputation(problem, 2 * free.memory)[1] == ()
    with pytest.raises(InfeasibleBudgetError):
        plan_with_recomputation(problem, 1000.0)


def test_a_solution_keeps_its_segments(tmp_path: Path) -> None:
    found = constructor("gpt2", grid(2, 2))
    best = solve_solution(found).plan
    solution = Solution(found.problem, best, segments(found.problem, best.choice)[:2])
    assert "in 2 segments run again in the backward pass" in str(solution)
    solution.save(tmp_path / "solution.json")
    loaded = load_solution(tmp_path / "solution.json", found.problem)
    assert loaded.sharded.recomputed == solution.sharded.recomputed
    assert loaded.sharded.predicted == solution.sharded.predicted


def test_what_changes_buffers_does_not_run_twice() -> None:
    problem = constructor("resnet", grid(2, 2)).problem
    names = {name for s in segments(problem, [0] * len(problem.vertices)) for name in s.names}
    assert not any(name.startswith("batch_norm") for name in names)


def _all_segments(rank: int, world_size: int, port: int, family: str) -> None:
    torch.set_num_threads(1)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    seen: list[tuple[PlanProblem, list[int]]] = []

    def make(problem: PlanProblem) -> list[int]:
        seen.append((problem, random_choice(problem, seed=3)))
        return seen[-1][1]

    def change(plan: ShardedPlan) -> None:
        problem, choice = seen[-1]
        sharded = Solution(problem, plan_of_choice(problem, choice), segments(problem, choice)).sharded
        assert sharded.recomputed
        plan.recomputed, plan.predicted = sharded.recomputed, sharded.predicted

    torch.manual_seed(5)
    plan = partial(PlannedTraining, shape=(2, 2), make=make, change=change)
    check_plan(small_problem(family), plan, tolerance=Tolerance(loss=1e-6, gradient=1e-5, weight=1e-5))


@parametrize_sample("family", ["gpt2", "llama"], 1)
def test_recomputed_segments_change_no_number_and_send_what_is_predicted(family: str) -> None:
    spawn(_all_segments, 4, family=family)
