"""``alpa_dp`` against all pipelines there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from colossalai.device import alpa_dp, get_submesh_choices


def test_submesh_choices() -> None:
    assert get_submesh_choices(3, 8) == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8)]
    assert get_submesh_choices(2, 6) == [(1, 1), (1, 2), (1, 3), (1, 6), (2, 6)]
    with pytest.raises(ValueError, match="at least 1 host"):
        get_submesh_choices(0, 8)


def brute_force(cost: np.ndarray, sizes: list[int], devices: int, microbatches: int) -> float:
    layers, best = len(cost), math.inf
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = list(zip((0, *cuts), (*cuts, layers), strict=True))
            for meshes in itertools.product(range(len(sizes)), repeat=count):
                if sum(sizes[m] for m in meshes) == devices:
                    times = [cost[a, b - 1, m].min() for (a, b), m in zip(bounds, meshes, strict=True)]
                    best = min(best, sum(times) + (microbatches - 1) * max(times))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_all_pipelines(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers, microbatches = int(random.integers(1, 6)), int(random.integers(1, 9))
    choices = get_submesh_choices(2, 2)
    cost = (
        random.uniform(1, 10, (layers, layers, len(choices), 2))
        * (1 + np.arange(layers))[None, :, None, None]
    )
    cost[random.uniform(size=cost.shape) < 0.2] = np.inf
    sizes = [math.prod(choice) for choice in choices]
    expected = brute_force(cost, sizes, 4, microbatches)
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no pipeline puts"):
            alpa_dp(layers, 4, microbatches, choices, 2, cost)
        return
    total, stages = alpa_dp(layers, 4, microbatches, choices, 2, cost)
    assert total == pytest.approx(expected)
    times = [cost[a, b - 1, mesh, config] for (a, b), mesh, config in stages]
    assert sum(times) + (microbatches - 1) * max(times) == pytest.approx(expected)
    assert sum(sizes[mesh] for _, mesh, _ in stages) == 4
    assert [bounds[0] for bounds, *_ in stages] == [0, *(bounds[1] for bounds, *_ in stages[:-1])]
    assert stages[-1][0][1] == layers


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is \(2, 2, 1, 1\)"):
        alpa_dp(2, 1, 1, [(1, 1)], 1, np.ones((2, 1, 1, 1)))
    with pytest.raises(ValueError, match="all 3 devices"):
        alpa_dp(1, 3, 1, [(1, 2)], 1, np.ones((1, 1, 1, 1)))
    with pytest.raises(ValueError, match="at least 1 micro-batch"):
        alpa_dp(1, 1, 0, [(1, 1)], 1, np.ones((1, 1, 1, 1)))
