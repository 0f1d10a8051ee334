"""Solvers of chains against brute force: searches over single operations, with the memory of each."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from colossalai.auto_parallel.checkpoint import (
    Backward,
    Chain,
    CheckpointSolverBase,
    CheckpointSolverChen,
    CheckpointSolverRotor,
    Forward,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    ModeCost,
    ModeProblem,
    ModeStage,
    Sequence,
    solve_modes,
)
from colossalai.auto_parallel.checkpoint.mode_solver import MODES, least_budget, peak_of, seconds_of
from colossalai.fx import symbolic_trace
from colossalai.utils.memory.live_bytes import LiveBytes


def random_chain(numbers: random.Random, stages: int) -> Chain:
    x = [numbers.randint(1, 4) for _ in range(stages + 1)]
    return Chain(
        [float(numbers.randint(1, 9)) for _ in range(stages)],
        [float(numbers.randint(1, 9)) for _ in range(stages)],
        x,
        [x[i + 1] + numbers.randint(0, 8) for i in range(stages)],
        [numbers.randint(0, 2) for _ in range(stages)],
        [numbers.randint(0, 2) for _ in range(stages)],
    )


# stages whose gradient is still missing, the loose activation, inputs that are kept, stages kept whole
State = tuple[int, int, frozenset[int], frozenset[int]]


def brute_force(chain: Chain, budget: int) -> float:
    """The least time of all schedules that never drop what they have kept, by the cheapest way between the
    states of the memory; those that must take the least in all are followed first.
    """

    def ahead(state: State) -> float:
        left, _, _, whole = state
        return sum(chain.btime[:left]) + sum(chain.ftime[i] for i in range(left) if i not in whole)

    start: State = (len(chain), 0, frozenset(), frozenset())
    queue: list[tuple[float, int, float, State]] = [(ahead(start), 0, 0.0, start)]
    ticket, done = itertools.count(1), set()
    while queue:
        _, _, spent, state = heapq.heappop(queue)
        if state[0] == 0:
            return spent
        if state in done:
            continue
        done.add(state)
        for cost, memory, after in moves(chain, state):
            if memory <= budget and after not in done:
                time = spent + cost
                heapq.heappush(queue, (time + ahead(after), -next(ticket), time, after))
    return float("inf")


def moves(chain: Chain, state: State) -> list[tuple[float, int, State]]:
    left, loose, inputs, whole = state
    alive = chain.x[left] + sum(chain.x[i] for i in inputs) + sum(chain.xbar[i] for i in whole)
    protected = {0, *inputs, *(i + 1 for i in whole)}
    alive += 0 if loose in protected else chain.x[loose]
    found = []
    for i in range(left):
        if i not in protected and i != loose:
            continue
        held = inputs if i in protected else inputs | {i}
        time, need = chain.ftime[i], alive + chain.x[i + 1] + chain.ftmp[i]
        dropped = 0 if loose in protected or loose == i else chain.x[loose]
        found.append((time, need - dropped, (left, i + 1, held, whole)))
        if i not in protected:
            found.append((time, need, (left, i + 1, inputs, whole)))
        if i not in whole:
            need = alive - dropped + chain.xbar[i] + chain.ftmp[i]
            found.append((time, need, (left, i + 1, held, whole | {i})))
    last = left - 1
    if last in whole and last in protected:
        loosened = chain.x[loose] if loose not in protected else 0
        after = (last, 0, inputs - {last}, whole - {last})
        found.append((chain.btime[last], alive - loosened + chain.btmp[last] + chain.x[last], after))
    return found


@pytest.mark.parametrize("part", range(4))
def test_rotor_is_optimal(part: int) -> None:
    numbers = random.Random(part)
    for case in range(75):
        stages = 8 if case % 25 == 0 else 1 + case % 5
        chain = random_chain(numbers, stages)
        solver = CheckpointSolverRotor(chain, memory_slots=10_000)
        most, least = solver.whole_memory(), solver.least_memory()
        assert brute_force(chain, least - 1) == float("inf")
        for budget in (least, numbers.randint(least, (least + most) // 2), most):
            exact = brute_force(chain, budget)
            solver = CheckpointSolverRotor(chain, budget, memory_slots=budget)
            sequence = solver.solve()
            assert sequence.cost(chain) == exact
            assert simulate(chain, sequence) <= budget
            assert solver.curve()[-1][1] == exact


def simulate(chain: Chain, sequence: Sequence) -> int:
    """Execute a schedule with nothing but what it keeps, and return its peak."""
    inputs, whole, peak, left, loose = {0}, set(), 0, len(chain), 0
    for op in sequence:
        alive = chain.x[left] + sum(chain.x[i] for i in inputs if i) + sum(chain.xbar[i] for i in whole)
        i = op.index
        if isinstance(op, Forward):
            assert i in inputs or i - 1 in whole or i == loose
            alive += chain.x[i] if i == loose and i not in inputs and i - 1 not in whole else 0
            if isinstance(op, ForwardEnable):
                inputs |= {i} - {j + 1 for j in whole}
                whole.add(i)
                peak = max(peak, alive + chain.xbar[i] + chain.ftmp[i])
            else:
                inputs |= ({i} - {j + 1 for j in whole}) if isinstance(op, ForwardCheck) else set()
                assert isinstance(op, (ForwardCheck, ForwardNograd))
                peak = max(peak, alive + chain.x[i + 1] + chain.ftmp[i])
            loose = i + 1
        elif isinstance(op, Backward):
            assert i == left - 1
            assert i in whole
            assert i in inputs or i - 1 in whole
            peak = max(peak, alive + chain.x[i] + chain.btmp[i])
            left, loose = i, -1
            whole.discard(i)
            inputs -= {i} - {0}
    assert left == 0
    return peak


def test_chen_cuts_into_segments() -> None:
    chain = Chain([1.0] * 16, [2.0] * 16, [1] * 17, [10] * 16)
    sequence = CheckpointSolverChen(chain).solve()
    assert simulate(chain, sequence) < sum(chain.xbar) // 2
    assert sequence.cost(chain) <= chain.sum_time + sum(chain.ftime)


def test_whole_seconds() -> None:
    chain = Chain([1, 1], [1, 1], [1, 1, 1], [2, 2])
    assert CheckpointSolverRotor(chain).solve().cost(chain) == 4


def test_curve_of_a_long_chain_falls() -> None:
    chain = random_chain(random.Random(0), 40)
    curve = CheckpointSolverRotor(chain, memory_slots=200).curve()
    assert [time for _, time in curve] == sorted((time for _, time in curve), reverse=True)
    assert curve[-1][1] == chain.sum_time


def test_bad_chains_and_budgets() -> None:
    with pytest.raises(ValueError, match="one more of x"):
        Chain([1.0], [1.0], [1], [1])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"at least 0, got btime with {wrong!r}"):
            Chain([1.0], [wrong], [1, 1], [1])
    chain = random_chain(random.Random(1), 3)
    with pytest.raises(ValueError, match="the least that one needs is about"):
        CheckpointSolverRotor(chain, 1).solve()
    for size in ("5", float("nan"), 0):
        with pytest.raises(ValueError, match=f"number of bytes, or -1 for any, got {size!r}"):
            CheckpointSolverRotor(chain, size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.fx\.Graph"):
        CheckpointSolverRotor(nn.Linear(2, 2))


def test_graph_gets_regions() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)))
    traced = fx.symbolic_trace(model)
    with pytest.raises(ValueError, match="does not know its value"):
        CheckpointSolverChen(traced.graph)
    ShapeProp(traced).propagate(torch.zeros(32, 8))
    whole = CheckpointSolverRotor(traced.graph, optim_multiplier=0.0)
    assert whole.solve() is traced.graph
    assert len(whole.chain) == 18
    assert not any("activation_checkpoint" in node.meta for node in traced.graph.nodes)
    static = sum(p.nbytes for p in model.parameters())
    tight = CheckpointSolverRotor(traced.graph, static + whole.least_memory() * 1.2, optim_multiplier=0.0)
    tight.solve()
    assert any("activation_checkpoint" in node.meta for node in traced.graph.nodes)


@pytest.mark.parametrize("solver", [CheckpointSolverChen, CheckpointSolverRotor])
def test_regions_of_a_traced_model_run(solver: type[CheckpointSolverBase]) -> None:
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)]
    model, x = nn.Sequential(*blocks), torch.rand(2048, 8)
    traced = symbolic_trace(model, meta_args={"input": x.to("meta")})

    def run(module: nn.Module) -> tuple[int, list[torch.Tensor | None]]:
        model.zero_grad()
        torch.manual_seed(0)
        with LiveBytes() as memory:
            loss = module(x).square().sum()
            kept = memory.now
            loss.backward()
        return kept, [p.grad for p in model.parameters()]

    kept, plain = run(traced)
    if solver is CheckpointSolverChen:
        CheckpointSolverChen(traced).solve()
    else:
        least = CheckpointSolverRotor(traced, optim_multiplier=0.0).least_memory()
        static = sum(p.nbytes for p in model.parameters())
        CheckpointSolverRotor(traced, static + 1.3 * least, optim_multiplier=0.0).solve()
    traced.recompile()
    less, again = run(traced)
    assert less < 0.7 * kept
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))  # type: ignore[arg-type]


def random_problem(numbers: random.Random, stages: int) -> ModeProblem:
    def cost(mode: str) -> ModeCost:
        kept, slow = {"keep": (9, 0), "selective": (5, 1), "full": (2, 3), "offload": (0, 5)}[mode]
        return ModeCost(
            kept + numbers.randint(-1, 2),
            numbers.randint(3, 9),
            numbers.randint(8, 20),
            4.0 + slow + numbers.randint(0, 3),
            2 + numbers.randint(0, 1) if mode == "offload" else None,
        )

    made = [
        ModeStage(str(i), {mode: cost(mode) for mode in MODES}, numbers.randint(0, 12)) for i in range(stages)
    ]
    if numbers.random() < 0.2:  # a block that is called twice
        made[-1].name = made[0].name
    return ModeProblem(made, least=numbers.randint(0, 15), seconds=1.0)


def test_modes_are_optimal() -> None:
    numbers = random.Random(0)
    for case in range(30):
        problem = random_problem(numbers, 2 + case % 4)
        names = [stage.name for stage in problem.stages]
        every = [
            modes
            for modes in itertools.product(MODES, repeat=len(names))
            if len(set(zip(names, modes, strict=True))) == len(set(names))
        ]
        peaks = {modes: peak_of(problem, modes) for modes in every}
        least = min(peaks.values())
        assert least_budget(problem) == least
        assert solve_modes(problem, least - 1) is None
        for budget in (least, least + 5, least + 15):
            best = min(seconds_of(problem, modes) for modes in every if peaks[modes] <= budget)
            choice = solve_modes(problem, budget)
            assert choice is not None
            assert choice.seconds == best
            assert choice.peak <= budget
            assert choice.gap == 0


def test_micro_batches_that_are_stored_besides() -> None:
    problem = replace(random_problem(random.Random(5), 5), copies=2)
    every = list(itertools.product(MODES, repeat=5))
    least, most = (f(peak_of(problem, modes) for modes in every) for f in (min, max))
    for budget in range(least, most + 1, 9):
        choice = solve_modes(problem, budget)
        best = min(seconds_of(problem, modes) for modes in every if peak_of(problem, modes) <= budget)
        assert choice is not None
        assert choice.peak <= budget
        assert choice.seconds == best
        assert choice.gap == 0


def test_few_states_give_a_gap() -> None:
    problem = random_problem(random.Random(3), 12)
    budget = (least_budget(problem) + peak_of(problem, ["keep"] * 12)) // 2
    exact, rough = solve_modes(problem, budget), solve_modes(problem, budget, states=4)
    assert exact is not None
    assert rough is not None
    assert rough.peak <= budget
    assert rough.seconds >= exact.seconds
    assert rough.seconds <= exact.seconds * (1 + rough.gap) + 1e-9
    assert rough.gap > 0
