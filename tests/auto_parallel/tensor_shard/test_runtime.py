"""Models that run by a plan, however odd, are the serial model; and what fits no plan is refused."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel.tensor_shard.runtime import gradient_buckets, program
from colossalai.auto_parallel.tensor_shard.sharded_plan import ShardedPlan
from colossalai.auto_parallel.tensor_shard.strategies.chosen import gathered_parameters
from colossalai.mesh import Layout, serial_tensor
from colossalai.testing import parametrize_sample, spawn
from colossalai.testing.parity import ParityError, Problem, Tolerance, check_plan
from tests.auto_parallel.tensor_shard.random_plans import EXACT, PlannedTraining, random_choice, solved_choice
from tests.auto_parallel.tensor_shard.small_models import FAMILIES, small_problem

_MESHES = ((1, 2), (2, 2), (1, 4), (2, 4))
# transformers computes losses and some norms in float32, whatever the dtype of the model
_SINGLE = Tolerance(loss=1e-6, gradient=1e-5, weight=1e-5)


def tolerance(family: str) -> Tolerance:
    return EXACT if family in ("mlp", "resnet", "vit") else _SINGLE


def _start(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(5)


# ---- parity ----


def _beside_serial(
    rank: int, world_size: int, port: int, family: str, shape: tuple[int, int], make: Any
) -> None:
    _start(rank, world_size, port)
    built: list[nn.Module] = []
    given = small_problem(family)

    def build() -> nn.Module:
        built.append(given.build())
        return built[-1]

    problem = Problem(build=build, batches=given.batches, loss=given.loss)
    plan = partial(PlannedTraining, shape=shape, make=make)
    check_plan(problem, plan, tolerance=tolerance(family))
    serial, planned = (dict(model.named_buffers()) for model in built)
    for name, buffer in planned.items():  # running statistics
        whole = serial_tensor(buffer, buffer, buffer.placed_on)  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, serial[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: n + m)


_CASES = [(family, shape, seed) for seed, shape, family in itertools.product(range(2), _MESHES, FAMILIES)]
_IDS = [f"{family}-{shape[0]}x{shape[1]}-{seed}" for family, shape, seed in _CASES]


@parametrize_sample("family, shape, seed", _CASES, 4, ids=_IDS)
def test_any_plan_equals_the_serial_model(family: str, shape: tuple[int, int], seed: int) -> None:
    """Also the bytes of every kind of collective are those that were predicted."""
    _check(family, shape, partial(random_choice, seed=seed))


def _check(family: str, shape: tuple[int, int], make: Any) -> None:
    if family not in ("mlp", "resnet"):
        pytest.importorskip("transformers")
    spawn(_beside_serial, shape[0] * shape[1], timeout=240, family=family, shape=shape, make=make)


class EinsumAttention(nn.Module):
    """Weights of three dims: whole, the einsum keeps a copy in another order, of a piece it keeps a view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 4, 16, 4) * 0.2)
        self.out = nn.Parameter(torch.randn(4, 4, 16) * 0.2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = torch.einsum("btd,ihde->ibhte", x, self.qkv).unbind(0)
        weights = torch.einsum("bhqe,bhke->bhqk", q, k).softmax(-1)
        return {"loss": (x + torch.einsum("bhqk,bhke,hed->bqd", weights, v, self.out)).square().mean()}


def _einsum(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)

    def build() -> nn.Module:
        torch.manual_seed(1)
        return EinsumAttention().double()

    batches = [{"x": torch.randn(8, 8, 16, dtype=torch.float64)} for _ in range(2)]
    problem = Problem(build=build, batches=batches, loss=lambda model, batch: model(**batch)["loss"])
    for seed in range(6):
        plan = partial(PlannedTraining, shape=(1, 4), make=partial(random_choice, seed=seed))
        check_plan(problem, plan, tolerance=EXACT)


def test_bytes_of_weights_of_which_an_operation_keeps_a_copy() -> None:
    spawn(_einsum, 4, timeout=240)


_BUDGETS = ("none", "medium", "tight")
_SOLVED = [
    (family, shape, budget) for family, shape, budget in itertools.product(FAMILIES, _MESHES, _BUDGETS)
]
_SOLVED_IDS = [f"{family}-{shape[0]}x{shape[1]}-{budget}" for family, shape, budget in _SOLVED]


@parametrize_sample("family, shape, budget", _SOLVED, 4, ids=_SOLVED_IDS)
def test_best_plans_equal_the_serial_model(family: str, shape: tuple[int, int], budget: str) -> None:
    _check(family, shape, partial(solved_choice, budget=budget))


def _recomputed(rank: int, world_size: int, port: int, seeds: list[int]) -> None:
    _start(rank, world_size, port)

    def change(plan: ShardedPlan) -> None:
        plan.recomputed = (("linear", "relu_", "dropout"), ("linear_1", "add", "layer_norm", "linear_2"))

    for seed in seeds:
        make = partial(random_choice, seed=seed)
        plan = partial(PlannedTraining, shape=(1, 2), make=make, change=change)
        torch.manual_seed(5)
        check_plan(small_problem("mlp"), plan, tolerance=EXACT)

    def wrong(plan: ShardedPlan) -> None:
        plan.recomputed = (("add_", "batch_norm"),)

    with pytest.raises(
        ValueError, match="recomputes 'add_', which changes a buffer and would change it twice"
    ):
        PlannedTraining(small_problem("mlp"), (1, 2), make, change=wrong)


def test_what_runs_again_in_the_backward_pass_draws_the_same() -> None:
    spawn(_recomputed, 2, seeds=[1, 2, 3])


def _gathered(problem: Any) -> list[int]:
    """Rows are cut, and matrices rest cut wherever they can."""
    best = _data_parallel(problem)
    for i, vertex in enumerate(problem.vertices):
        if vertex.kind == "parameter":
            best[i] = max(
                range(len(vertex.placements)), key=lambda n, v=vertex: len(v.placements[n].outputs[0].sharded)
            )
    assert gathered_parameters(problem, best)
    return best


def _weights_gathered(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    check_plan(small_problem("mlp"), partial(PlannedTraining, shape=(2, 2), make=_gathered), tolerance=EXACT)
    torch.manual_seed(5)
    problem = small_problem("mlp")
    run = PlannedTraining(problem, (2, 2), _gathered)
    assert run.model.up.weight.numel() == 32 * 16 // 4  # type: ignore[union-attr, operator]

    def whole_weights() -> int:
        gc.collect()
        shapes = ((32, 16), (16, 32))
        return sum(torch.is_tensor(o) and tuple(o.shape) in shapes for o in gc.get_objects())

    before = whole_weights()
    loss = run.problem.loss(run.model, problem.batches[0])
    assert whole_weights() == before  # nothing gathered is kept until the backward pass
    with torch.no_grad():
        run.model.down.weight.add_(1.0)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="changed in place between the forward pass and the backward pass"):
        loss.backward()
    loss = run.problem.loss(run.model, problem.batches[0])
    with pytest.raises(RuntimeError, match="cannot give gradients of gradients"):
        loss.backward(create_graph=True)


def test_weights_that_are_gathered_are_not_kept() -> None:
    spawn(_weights_gathered, 4)


def _without_a_sum(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    problem = small_problem("mlp")
    plan = partial(PlannedTraining, shape=(1, 2), make=_data_parallel)
    check_plan(problem, plan, tolerance=EXACT)
    summed = gradient_buckets.GradientBuckets._summed

    def unsummed(self: Any, bucket: Any) -> torch.Tensor:
        return bucket.pending() * 0 + torch.cat([grad.reshape(-1) for grad in bucket.grads])

    try:
        gradient_buckets.GradientBuckets._summed = unsummed  # type: ignore[method-assign]
        torch.manual_seed(5)
        with pytest.raises(ParityError, match="gradient at step 0"):
            check_plan(problem, plan, tolerance=EXACT)
    finally:
        gradient_buckets.GradientBuckets._summed = summed  # type: ignore[method-assign]
    move = program.redistribute
    try:
        program.redistribute = lambda x, src, dst, *rest, **options: move(  # type: ignore[assignment]
            x, Layout(src.dims), Layout(dst.dims), *rest, **options
        )
        torch.manual_seed(5)
        with pytest.raises((ParityError, AssertionError)):
            check_plan(problem, partial(PlannedTraining, shape=(1, 2), make=partial(random_choice, seed=3)))
    finally:
        program.redistribute = move


def _data_parallel(problem: Any) -> list[int]:
    """The strategies that cut the first dim of everything, where there are some."""
    names = {"S1", "S0", "S01"}

    def score(placement: Any) -> tuple[int, ...]:
        rows = [bool(out.dims and out.dims[0]) for out in placement.outputs]
        weights = [len(layout.sharded) for layout in placement.inputs[1:]]
        return (-sum(rows), sum(weights), len(names & {placement.name}))

    best = [
        min(range(len(v.placements)), key=lambda n, v=v: score(v.placements[n])) for v in problem.vertices
    ]
    for flow in problem.flows:
        assert problem.table(flow)[best[flow.source], best[flow.target]] < float("inf")
    return best


def test_a_sum_that_is_left_out_is_seen() -> None:
    spawn(_without_a_sum, 2)
