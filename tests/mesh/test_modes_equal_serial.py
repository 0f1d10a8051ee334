"""1D, 2D, 2.5D and 3D with data parallelism and ZeRO-3, built on the core alone, equal plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from colossalai.mesh import Layout, collectives, movement
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d, with_data_parallel
from colossalai.testing import RankError
from colossalai.testing.parity import PlacedRun, Problem, assert_equal_to_serial
from tests.mesh.reference_model import Sizes, plan, problem

EVEN = Sizes()
ODD = Sizes(
    vocab=36, hidden=36, heads=6, batch=12, sequence=6, layers=1
)  # no powers of two; divisible by 2 and by 3
PLANS: dict[str, TensorParallel] = {
    "1d": mode_1d(2),
    "1d-sequence": mode_1d(2, sequence_parallel=True),
    "2d": mode_2d(2),
    "2d-3x3": mode_2d(3),
    "2.5d": mode_2p5d(2, 2),
    "3d": mode_3d(2),
    "dp": with_data_parallel(mode_1d(1), 3),
    "dp-zero3": with_data_parallel(mode_1d(1), 3, shard_weights=True),
    "dp-1d": with_data_parallel(mode_1d(2), 2),
    "dp-1d-zero3": with_data_parallel(mode_1d(2), 2, shard_weights=True),
    "dp-2d-zero3": with_data_parallel(mode_2d(2), 2, shard_weights=True),
    "dp-3d": with_data_parallel(mode_3d(2), 1),
}


def sizes_for(name: str) -> Sizes:
    return ODD if math.prod(PLANS[name].axes.values()) % 3 == 0 else EVEN


# in CI every other plan has a head that is tied to the table, and the others have one that is not
CASES = [
    pytest.param(
        name,
        tied,
        id=f"{name}-{'tied' if tied else 'untied'}",
        marks=() if (i % 2 == 0) == tied else pytest.mark.slow,
    )
    for i, name in enumerate(PLANS)
    for tied in (False, True)
]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_plan_equals_serial(name: str, tied: bool) -> None:
    sizes = replace(sizes_for(name), tied=tied)
    tp = PLANS[name]
    assert_equal_to_serial(
        partial(problem, sizes), partial(plan, tp=tp, sizes=sizes), math.prod(tp.axes.values())
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["1d", "2d", "2.5d", "3d", "dp-1d-zero3"])
def test_plan_equals_serial_on_one_gpu(name: str) -> None:
    """All ranks share the GPU and talk over gloo."""
    sizes, tp = replace(sizes_for(name), device="cuda"), PLANS[name]
    assert_equal_to_serial(
        partial(problem, sizes), partial(plan, tp=tp, sizes=sizes), math.prod(tp.axes.values())
    )


def _forget(name: str) -> None:
    """Break the core in this process, as a careless change would."""
    if name == "all_reduce":
        collectives.all_reduce = lambda x, *_: x
    elif name == "reduce_scatter":
        collectives.reduce_scatter = lambda x, mesh, axis, dim, uneven=False: collectives.cut(
            x, mesh, axis, dim
        )
    elif name == "dual":
        Layout.dual = lambda self: self  # type: ignore[method-assign]
        movement.route.cache_clear()
    elif name == "fused":
        Layout.blocks = lambda self, dim: 1  # type: ignore[method-assign]


def _broken_plan(problem: Problem, tp: TensorParallel, sizes: Sizes, forget: str) -> PlacedRun:
    run = plan(problem, tp, sizes)
    _forget(forget)
    return run


@pytest.mark.parametrize(
    ("forget", "name", "message"),
    [
        ("all_reduce", "1d", "loss at step 0"),
        ("all_reduce", "dp-1d", "loss at step 0|gradient at step 0"),
        ("reduce_scatter", "3d", "loss at step 0"),
        ("reduce_scatter", "dp-zero3", "gradient at step 0"),
        ("dual", "2d", "gradient at step 0|cannot go from"),
        ("fused", "dp-1d-zero3", "initial weight"),
    ],
)
def test_the_check_catches_a_broken_core(forget: str, name: str, message: str) -> None:
    sizes, tp = sizes_for(name), PLANS[name]
    with pytest.raises(RankError, match=message):
        assert_equal_to_serial(
            partial(problem, sizes),
            partial(_broken_plan, tp=tp, sizes=sizes, forget=forget),
            math.prod(tp.axes.values()),
        )
