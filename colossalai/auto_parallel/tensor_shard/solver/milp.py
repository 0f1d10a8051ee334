"""The choice of strategies as a mixed-integer program, for HiGHS (scipy) and CBC (PuLP).

A variable per strategy, of which a node takes one; a variable per pair of strategies of an edge, whose sums
by rows and by columns are the strategies of its ends.  The latter need not be integers: they follow, and make
the relaxation tight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from colossalai.auto_parallel.tensor_shard.solver.elimination import Ints
from colossalai.auto_parallel.tensor_shard.solver.lagrangian import FlatGraph
from colossalai.auto_parallel.tensor_shard.solver.strategy_graph import Floats

_SCALE = 1e4  # of the budget, and of the cost: tolerances of solvers are absolute


@dataclass
class MilpAnswer:
    """A plan, if one was found, and the bound; ``proved_infeasible`` if there is none."""

    choice: Ints | None
    lower: float
    proved_infeasible: bool = False


@dataclass
class _Program:
    """Minimize ``cost @ x`` for ``lower <= A x <= upper``, ``0 <= x <= 1``; A by rows, columns and values."""

    cost: Floats
    integer: int
    """How many variables, from the first, are integers."""
    rows: Ints
    columns: Ints
    values: Floats
    lower: Floats
    upper: Floats


def _program(flat: FlatGraph, budget: float | None, cost_scale: float) -> _Program:
    offsets, total = flat.offsets, len(flat.cost)
    blocked = ~np.isfinite(flat.cost)
    costs = [np.where(blocked, 0.0, flat.cost)]
    rows, columns = [np.repeat(np.arange(len(flat.sizes)), flat.sizes)], [np.arange(total)]
    values = [np.where(blocked, 0.0, 1.0)]
    row, variable = len(flat.sizes), total
    for (u, v), table in flat.edges.items():
        i, j = np.nonzero(np.isfinite(table))
        at = variable + np.arange(len(i))
        a, b = table.shape
        costs.append(table[i, j])
        rows += [row + i, row + a + j, row + np.arange(a + b)]
        columns += [at, at, np.concatenate([offsets[u] + np.arange(a), offsets[v] + np.arange(b)])]
        values += [np.ones(len(i)), np.ones(len(i)), np.full(a + b, -1.0)]
        row, variable = row + a + b, variable + len(i)
    ones = len(flat.sizes)
    lower = np.concatenate([np.ones(ones), np.zeros(row - ones)])
    upper = lower.copy()
    # a variable that is always one carries what is folded, so that relative gaps are those of the whole
    costs.append(np.array([flat.graph.cost]))
    rows.append(np.array([row]))
    columns.append(np.array([variable]))
    values.append(np.ones(1))
    lower, upper = np.append(lower, 1.0), np.append(upper, 1.0)
    if blocked.any():
        rows.append(np.full(int(blocked.sum()), row + 1))
        columns.append(np.flatnonzero(blocked))
        values.append(np.ones(int(blocked.sum())))
        lower, upper = np.append(lower, 0.0), np.append(upper, 0.0)
        row += 1
    if budget is not None:
        unit = _SCALE / max(budget, 1.0)
        rows.append(np.full(total, row + 1))
        columns.append(np.arange(total))
        values.append(flat.memory * unit)
        lower, upper = np.append(lower, -np.inf), np.append(upper, (budget - flat.graph.memory) * unit)
    joined = [np.concatenate(x) for x in (costs, rows, columns, values)]
    return _Program(joined[0] * cost_scale, total, joined[1], joined[2], joined[3], lower, upper)


def _cost_scale(flat: FlatGraph) -> float:
    finite = flat.cost[np.isfinite(flat.cost)]
    top = float(finite.max()) if len(finite) else 0.0
    return _SCALE / top if top > 0 else 1.0


def _choice(flat: FlatGraph, x: Floats) -> Ints:
    spans = zip(flat.offsets[:-1], flat.sizes, strict=True)
    return np.array([int(x[a : a + k].argmax()) for a, k in spans], dtype=np.intp)


def _without_choice(flat: FlatGraph, budget: float | None) -> MilpAnswer | None:
    """The answer where folding has left nothing to choose; None where it has."""
    graph = flat.graph
    if not np.isfinite(graph.cost):
        return MilpAnswer(None, 0.0, proved_infeasible=True)
    if flat.nodes:
        return None
    if budget is not None and graph.memory > budget:
        return MilpAnswer(None, 0.0, proved_infeasible=True)
    return MilpAnswer(np.zeros(0, dtype=np.intp), graph.cost)


def highs(flat: FlatGraph, budget: float | None, gap: float, time_limit: float | None) -> MilpAnswer:
    """Solve with HiGHS, as scipy ships it."""
    if (known := _without_choice(flat, budget)) is not None:
        return known
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as error:
        raise ImportError(
            "the rest of this problem goes to HiGHS, which needs scipy, which is not installed; "
            'pip install scipy (or "colossalai[auto]"), or accept a larger gap'
        ) from error
    scale = _cost_scale(flat)
    p = _program(flat, budget, scale)
    shape = (len(p.lower), len(p.cost))
    integrality = np.zeros(shape[1])
    integrality[: p.integer] = 1
    options: dict[str, Any] = {"mip_rel_gap": gap}
    if time_limit is not None:
        options["time_limit"] = max(time_limit, 0.0)
    found = milp(
        p.cost,
        constraints=LinearConstraint(
            csr_matrix((p.values, (p.rows, p.columns)), shape=shape), p.lower, p.upper
        ),
        integrality=integrality,
        bounds=Bounds(0, 1),
        options=options,
    )
    lower = found.mip_dual_bound / scale if found.mip_dual_bound is not None else 0.0
    if found.x is None:
        return MilpAnswer(None, lower, proved_infeasible=found.status == 2)
    return MilpAnswer(_choice(flat, found.x), lower)


def cbc(flat: FlatGraph, budget: float | None, gap: float, time_limit: float | None) -> MilpAnswer:
    """Solve with CBC through PuLP."""
    if (known := _without_choice(flat, budget)) is not None:
        return known
    try:
        import pulp
    except ImportError as error:
        raise ImportError(
            "backend 'pulp' needs PuLP, which is not installed; pip install pulp, or use backend 'auto'"
        ) from error
    scale = _cost_scale(flat)
    p = _program(flat, budget, scale)
    problem = pulp.LpProblem("strategies", pulp.LpMinimize)
    add = getattr(problem, "add_variable", pulp.LpVariable)  # as of PuLP 4, variables belong to a problem
    kinds = [pulp.LpInteger] * p.integer + [pulp.LpContinuous] * (len(p.cost) - p.integer)
    xs = [add(f"x{i}", 0, 1, kind) for i, kind in enumerate(kinds)]
    problem.setObjective(pulp.LpAffineExpression(list(zip(xs, p.cost.tolist(), strict=True))))
    terms: list[list[tuple[Any, float]]] = [[] for _ in p.lower]
    for r, c, value in zip(p.rows.tolist(), p.columns.tolist(), p.values.tolist(), strict=True):
        terms[r].append((xs[c], value))
    for row, low, high in zip(terms, p.lower.tolist(), p.upper.tolist(), strict=True):
        line = pulp.LpAffineExpression(row)
        problem += (line == high) if low == high else (line <= high)
    names = [n for n in ("COIN_CMD", "PULP_CBC_CMD") if n in pulp.listSolvers(onlyAvailable=True)]
    if not names:
        raise ImportError("backend 'pulp' finds no CBC; pip install \"pulp[cbc]\", or install coin-or-cbc")
    solver = getattr(pulp, names[0])
    problem.solve(solver(msg=False, timeLimit=time_limit, gapRel=gap))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return MilpAnswer(None, 0.0, proved_infeasible=problem.status == pulp.LpStatusInfeasible)
    choice = _choice(flat, np.array([x.value() or 0.0 for x in xs[: p.integer]]))
    if problem.sol_status != pulp.LpSolutionOptimal:
        return MilpAnswer(choice, 0.0)
    # CBC stops when the gap is this part of the root's relaxation, which is not above the cost
    return MilpAnswer(choice, float(flat.measure(choice[None])[0][0]) * (1 - gap))
