"""The solver finds what looking at all plans finds, and what HiGHS and CBC find, and proves it."""

from __future__ import annotations

import builtins
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest

import colossalai.auto_parallel.tensor_shard.solver.solve as solve
from colossalai.auto_parallel.tensor_shard.solver import (
    InfeasibleBudgetError,
    StrategyGraph,
    StrategyPlan,
    equal_layers,
    solve_strategies,
)
from tests.auto_parallel.tensor_shard.graphs import middle, random_graph, random_layers

NO_SCIPY = "needs scipy: pip install scipy"


def outcome(graph: StrategyGraph, **options: Any) -> StrategyPlan | str:
    """The plan, or what is said instead of one."""
    try:
        return solve_strategies(graph, gap=0.0, **options)
    except ValueError as error:
        return str(error)


def assert_same(found: StrategyPlan | str, expected: StrategyPlan | str) -> None:
    """Both are the best plan (several plans may be), or both say the same."""
    if isinstance(expected, str):
        assert found == expected
        return
    assert isinstance(found, StrategyPlan), found
    assert found.cost == pytest.approx(expected.cost, rel=1e-9)
    assert found.lower_bound == pytest.approx(expected.cost, rel=1e-6)
    assert found.cost == pytest.approx(found.graph.cost(found.choice))
    assert found.memory == found.graph.memory(found.choice)
    if found.graph.memory_budget is not None:
        assert found.memory <= found.graph.memory_budget


@pytest.mark.parametrize("seed", range(0, 300, 50))
def test_equal_to_brute_force(seed: int) -> None:
    """300 graphs, half of them with forbidden pairs; also with tables so small that nodes are split."""
    pytest.importorskip("scipy", reason=NO_SCIPY)
    for s in range(seed, seed + 50):
        nodes = int(np.random.default_rng(s).integers(2, 10))
        graph = random_graph(s, nodes, 4, forbidden=0.15 * (s % 2))
        best = outcome(graph, backend="brute")
        assert_same(outcome(graph), best)
        if isinstance(best, str):
            continue
        for part in (0.0, 0.3, 0.7):
            limited = graph.with_budget(middle(graph, part, best.memory))
            expected = outcome(limited, backend="brute")
            assert_same(outcome(limited), expected)
            assert_same(outcome(limited, max_cells=16), expected)


MEDIUM = [pytest.param(seed, marks=() if seed % 5 == 0 else pytest.mark.slow) for seed in range(50)]


@pytest.mark.parametrize("seed", MEDIUM)
def test_equal_to_highs(seed: int) -> None:
    """Deep graphs and wide ones; a part of the cases takes a bound from split nodes."""
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_layers(seed, 8, 0.1) if seed % 2 else random_graph(seed, 24, 6, edges=0.12)
    free = solve_strategies(graph, gap=0.0)
    assert_same(free, solve_strategies(graph, gap=0.0, backend="milp"))
    limited = graph.with_budget(middle(graph, 0.2 + 0.2 * (seed % 3), free.memory))
    expected = solve_strategies(limited, gap=0.0, backend="milp")
    assert_same(solve_strategies(limited, gap=0.0), expected)
    assert_same(solve_strategies(limited, gap=0.0, max_cells=200), expected)


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_cbc(seed: int) -> None:
    pytest.importorskip("pulp", reason="needs PuLP: pip install pulp")
    graph = random_graph(seed, 7, 4, forbidden=0.1)
    best = outcome(graph, backend="brute")
    assert isinstance(best, StrategyPlan)
    limited = graph.with_budget(middle(graph, 0.5, best.memory))
    assert_same(outcome(limited, backend="pulp"), outcome(limited, backend="brute"))


def test_a_backend_may_exceed_the_budget_by_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = StrategyGraph(memory_budget=10.0)
    graph.add_node("only", [1.0, 2.0, 3.0], [11, 10, 9])
    brute, budgets = solve._BACKENDS["brute"], list[float]()

    def tolerant(flat: Any, budget: float, *args: Any) -> Any:
        budgets.append(budget)
        return brute(flat, budget + 1, *args)

    monkeypatch.setitem(solve._BACKENDS, "milp", tolerant)
    plan = solve_strategies(graph, gap=0.0, backend="milp")
    assert budgets == [10.0, 9.0]
    assert (plan.cost, plan.memory, plan.lower_bound) == (2.0, 10.0, 1.0)


@pytest.mark.parametrize("backend", ["milp", "pulp"])
def test_a_backend_without_time(backend: str) -> None:
    """Then the smallest plan is the answer, if the backend has none."""
    package = {"milp": "scipy", "pulp": "pulp"}[backend]
    pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    graph = random_layers(3, 20, 0.1)
    limited = graph.with_budget(middle(graph, 0.4, solve_strategies(graph).memory))
    plan = solve_strategies(limited, gap=0.0, backend=backend, time_limit=0.0)
    assert plan.memory <= (limited.memory_budget or 0)
    assert 0 <= plan.lower_bound <= plan.cost


def test_the_price_of_memory_needs_only_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "scipy", "pulp")
    graph = random_layers(0, 12, 0.1)
    free = solve_strategies(graph, gap=0.0)
    assert free.gap == pytest.approx(0, abs=1e-12)
    plan = solve_strategies(graph.with_budget(middle(graph, 0.5, free.memory)), gap=0.05)
    assert plan.gap <= 0.05
    assert plan.lower_bound >= free.cost


def test_a_plan_that_nearly_fits_is_mixed_with_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one price all pairs of nodes change together; the best plan changes 17 of 40 pairs."""
    _without(monkeypatch, "scipy")
    graph = StrategyGraph(memory_budget=800.0 - 17 * 10)
    for i in range(40):
        one, two = (graph.add_node(f"node{i}{end}", [1.0, 2.0], [10, 5]) for end in "ab")
        graph.add_edge(one, two, [[0.0, 9.0], [9.0, 0.0]])
    plan = solve_strategies(graph, gap=0.0)
    assert plan.cost == plan.lower_bound == 2 * (40 + 17)


@pytest.mark.parametrize(("backend", "package"), [("auto", "scipy"), ("milp", "scipy"), ("pulp", "pulp")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, package: str) -> None:
    _without(monkeypatch, "scipy", "pulp")
    graph = random_graph(11, 9, 4)
    graph = graph.with_budget(middle(graph, 0.5, solve_strategies(graph).memory))
    with pytest.raises(ImportError, match=f"pip install {package}"):
        solve_strategies(graph, backend=backend, gap=0.0)


def _without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    real = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in packages:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [m for m in sys.modules if m.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", fail)


@pytest.mark.parametrize("forbidden", [0.0, 0.5])
@pytest.mark.parametrize("seed", [1, 2, 3, 8, 9, 12])  # these have a plan, also with forbidden pairs
def test_the_runner_up_costs_what_brute_force_says(seed: int, forbidden: float) -> None:
    graph = random_graph(seed, 6, 4, forbidden=forbidden)
    plan = solve_strategies(graph, gap=0.0)
    totals = [np.full(len(n), np.inf) for n in graph.nodes]
    for choice in product(*(range(len(n)) for n in graph.nodes)):
        cost = graph.cost(choice)
        for total, c in zip(totals, choice, strict=True):
            total[c] = min(total[c], cost)
    for node, chosen, total, reason in zip(graph.nodes, plan.choice, totals, plan.reasons, strict=True):
        others = np.delete(total, chosen)
        assert reason.exact
        assert (reason.node, reason.strategy) == (node.name, node.strategies[chosen])
        assert reason.total == pytest.approx(plan.cost)
        assert reason.runner_up_total == pytest.approx(others.min() if len(others) else np.inf)
        if len(others):
            assert total[node.strategies.index(str(reason.runner_up))] == pytest.approx(others.min())


def test_reasons_under_a_budget_are_bounds() -> None:
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_graph(4, 7, 4)
    free = solve_strategies(graph, gap=0.0)
    limited = graph.with_budget(middle(graph, 0.3, free.memory))
    plan = solve_strategies(limited, gap=0.0)
    assert plan.memory_price > 0
    best = {}
    for choice in product(*(range(len(n)) for n in graph.nodes)):
        if graph.memory(choice) <= (limited.memory_budget or 0):
            for pair in enumerate(choice):
                best[pair] = min(best.get(pair, np.inf), graph.cost(choice))
    for i, reason in enumerate(plan.reasons):
        assert not reason.exact
        assert reason.total <= best[i, plan.choice[i]] + 1e-9
        if reason.runner_up is not None:
            second = graph.nodes[i].strategies.index(reason.runner_up)
            assert reason.runner_up_total <= best.get((i, second), np.inf) + 1e-9
    reason = plan.explain("node0")
    assert str(reason).startswith(f"node0 {reason.strategy}: ")
    with pytest.raises(KeyError, match="'nothing'"):
        plan.explain("nothing")


def test_equal_layers_are_found() -> None:
    graph = random_layers(1, 6)
    names = [{graph.nodes[m].name.split(".")[1] for m in group} for group in equal_layers(graph)]
    assert all(len(kinds) == 1 for kinds in names)
    assert max(len(group) for group in equal_layers(graph)) == 6
    assert equal_layers(random_layers(1, 6, jitter=0.1)) == []


@pytest.mark.parametrize("seed", range(4))
def test_tied_layers_choose_alike(seed: int) -> None:
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_layers(seed, 6, strategies=3)
    free = solve_strategies(graph, gap=0.0)
    limited = graph.with_budget(middle(graph, 0.5, free.memory))
    tied = solve_strategies(limited, gap=0.0, tie=True)
    for group in equal_layers(graph):
        assert len({tied.choice[m] for m in group}) == 1
    assert tied.cost >= solve_strategies(limited, gap=0.0).lower_bound - 1e-9
    # the same groups as a rule of the graph, and by another solver
    grouped = random_layers(seed, 6, strategies=3).with_budget(limited.memory_budget)
    for group in equal_layers(graph):
        grouped.add_group(group)
    assert_same(tied, solve_strategies(grouped, gap=0.0, backend="brute"))
    assert_same(solve_strategies(grouped, gap=0.0, backend="milp"), solve_strategies(grouped, gap=0.0))
    assert len(tied.reasons) == len(graph.nodes)


def test_layers_that_cannot_choose_alike_are_not_tied() -> None:
    graph = StrategyGraph()
    for name in "abc":
        graph.add_node(name, [1.0, 2.0])
    for i in (0, 1, 2):
        graph.add_edge(i, (i + 1) % 3, [[np.inf, 0.0], [0.0, 0.0]])
    assert solve_strategies(graph, gap=0.0, tie=True).cost == 5 or equal_layers(graph)
    pair = StrategyGraph(list(graph.nodes[:2]))
    pair.add_edge(0, 1, [[np.inf, 0.0], [0.0, np.inf]])
    pair.add_edge(1, 0, [[np.inf, 0.0], [0.0, np.inf]])
    assert equal_layers(pair) == [(0, 1)]
    assert solve_strategies(pair, gap=0.0, tie=True).cost == 3.0


@pytest.mark.parametrize("backend", ["auto", "milp", "brute"])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_a_budget_below_the_minimum_names_it(backend: str, forbidden: float) -> None:
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_graph(7, 8, 3, forbidden=forbidden)
    allowed = [c for c in product(*(range(len(n)) for n in graph.nodes)) if graph.cost(c) < np.inf]
    minimum = min(graph.memory(c) for c in allowed)
    with pytest.raises(InfeasibleBudgetError, match=f"needs {minimum:.0f} bytes") as caught:
        solve_strategies(graph.with_budget(minimum - 1), backend=backend)
    assert caught.value.minimum == minimum
    assert solve_strategies(graph.with_budget(minimum), backend=backend).memory == minimum


def test_a_wide_graph_below_the_minimum() -> None:
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_graph(5, 9, 3, edges=0.8, forbidden=0.1)
    allowed = [c for c in product(*(range(len(n)) for n in graph.nodes)) if graph.cost(c) < np.inf]
    minimum = min(graph.memory(c) for c in allowed)
    with pytest.raises(InfeasibleBudgetError, match=f"needs {minimum:.0f} bytes"):
        solve_strategies(graph.with_budget(minimum - 1), max_cells=8)
    assert solve_strategies(graph.with_budget(minimum), max_cells=8, gap=0.0).memory == minimum


def test_no_plan_at_all() -> None:
    graph = StrategyGraph()
    graph.add_node("a", [1.0, 2.0])
    graph.add_node("b", [1.0])
    graph.add_edge(0, 1, [[np.inf], [np.inf]])
    for budget in (None, 10.0):
        with pytest.raises(ValueError, match="leave no plan"):
            solve_strategies(graph.with_budget(budget))


def test_without_time_the_best_so_far_is_the_answer() -> None:
    graph = random_layers(3, 20, 0.1)
    free = solve_strategies(graph, gap=0.0)
    limited = graph.with_budget(middle(graph, 0.4, free.memory))
    plan = solve_strategies(limited, gap=0.0, time_limit=0.0)
    assert plan.memory <= (limited.memory_budget or 0)
    assert 0 < plan.gap < 1
    assert free.cost - 1e-9 <= plan.lower_bound < plan.cost
    assert "milp" not in plan.seconds


def test_the_same_answer_every_time() -> None:
    pytest.importorskip("scipy", reason=NO_SCIPY)
    graph = random_layers(5, 6)
    graph = graph.with_budget(middle(graph, 0.5, solve_strategies(graph).memory))
    plans = [solve_strategies(graph, gap=0.0) for _ in range(3)]
    assert len({p.choice for p in plans}) == len({p.lower_bound for p in plans}) == 1


def test_an_empty_graph_and_one_node() -> None:
    assert solve_strategies(StrategyGraph()).choice == ()
    graph = StrategyGraph(memory_budget=5.0)
    graph.add_node("only", [1.0, 2.0], [10, 5], ["RR = RR x RR", "S0R = S0R x RR"])
    plan = solve_strategies(graph)
    assert plan.strategies == {"only": "S0R = S0R x RR"}
    assert "only S0R = S0R x RR" in str(plan)
    assert plan.gap == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cplex"}, "backend='cplex'; expected one of auto, milp, pulp, brute"),
        ({"gap": -1}, "gap=-1"),
        ({"gap": 1.5}, "gap=1.5"),
        ({"time_limit": -1.0}, "time_limit=-1.0"),
        ({"time_limit": float("nan")}, "time_limit=nan"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_strategies(random_graph(0, 3, 2), **options)


def test_bad_graphs() -> None:
    graph = StrategyGraph()
    graph.add_node("a", [1.0, 2.0])
    for cost, memory, message in (
        ([[1.0]], None, "'b' has 2 dims; expected 1"),
        ([], None, "0 strategies"),
        ([1.0], [1, 2], "1 costs and 2 sizes"),
        ([-1.0], None, "-1.0 at"),
        ([float("nan")], None, "nan at"),
        ([float("inf")], None, "every strategy costs inf"),
        ([1.0], [float("inf")], "finite bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            graph.add_node("b", cost, memory)
    graph.add_node("b", [1.0])
    for args, message in (
        ((0, 2, [[1.0]]), "there is no node 2"),
        ((0, 0, [[1.0]]), "joins a node with itself"),
        ((0, 1, [[1.0, 2.0]]), r"shape \(1, 2\); expected \(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            graph.add_edge(*args)
    with pytest.raises(ValueError, match="cannot choose alike"):
        graph.add_group([0, 1])
    graph.add_node("c", [3.0, 4.0])
    graph.add_group([0, 2])
    with pytest.raises(ValueError, match="in another group already"):
        graph.add_group([2, 0])
    with pytest.raises(ValueError, match="there is no node 9"):
        graph.add_group([9])
    for budget in (-5.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="memory_budget"):
            solve_strategies(graph.with_budget(budget))
    with pytest.raises(ValueError, match="plans; expected at most"):
        solve_strategies(random_graph(0, 40, 4), backend="brute")
