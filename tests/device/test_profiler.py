"""``AlphaBetaProfiler`` and what it is made of: fits, grids, and a real measurement."""

from __future__ import annotations

import itertools

import pytest

from colossalai.device import AlphaBetaProfiler, Timing, measure_cpu, measure_links
from colossalai.device.alpha_beta_profiler import AlphaBeta, _rounds
from colossalai.device.measure import fit_alpha_beta
from colossalai.mesh import Mesh
from colossalai.testing import spawn
from tests.mesh.world import start


def nodes(*islands: list[int], within: float = 1e-11, between: float = 1e-9) -> AlphaBeta:
    """alpha and beta of devices in ``islands``, each pair once."""
    where = {device: n for n, island in enumerate(islands) for device in island}
    return {
        (a, b): (1e-5, within) if where[a] == where[b] else (3e-5, between)
        for a, b in itertools.combinations(sorted(where), 2)
    }


def test_rows_are_the_fast_islands() -> None:
    profiler = AlphaBetaProfiler(range(8), nodes([0, 1, 2, 3], [4, 5, 6, 7]))
    assert profiler.search_best_logical_mesh() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert profiler.extract_alpha_beta_for_device_mesh() == ([3e-5, 1e-5], [1e-9, 1e-11])
    mixed = AlphaBetaProfiler(range(4), nodes([0, 2], [1, 3]))
    assert mixed.search_best_logical_mesh() == [[0, 2], [1, 3]]


def test_equal_links_give_a_square_and_uneven_islands_too() -> None:
    alike = AlphaBetaProfiler(range(8), nodes(list(range(8))))
    assert alike.search_best_logical_mesh() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    uneven = AlphaBetaProfiler(range(4), nodes([0, 1, 2], [3]))
    assert uneven.search_best_logical_mesh() == [[0, 1], [2, 3]]
    assert uneven.extract_alpha_beta_for_device_mesh() == ([3e-5, 3e-5], [1e-9, 1e-9])
    alone = AlphaBetaProfiler([0], {})
    assert alone.search_best_logical_mesh() == [[0]]
    assert alone.extract_alpha_beta_for_device_mesh() == ([0.0, 0.0], [0.0, 0.0])


def test_noise_within_the_tolerance_is_no_difference() -> None:
    table = nodes([0, 1], [2, 3], between=1.05e-11)
    assert AlphaBetaProfiler(range(4), table)._islands() == [[0, 1, 2, 3]]
    assert AlphaBetaProfiler(range(4), table, homogeneous_tolerance=0.01)._islands() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("count", range(1, 8))
def test_every_pair_has_its_round_and_every_device_is_in_each(count: int) -> None:
    rounds = _rounds(range(count))
    pairs = sorted(pair for together in rounds for pair in together if len(pair) == 2)
    assert pairs == list(itertools.combinations(range(count), 2))
    assert all(sorted(itertools.chain(*together)) == list(range(count)) for together in rounds)


def test_fit() -> None:
    alpha, beta = fit_alpha_beta(2e-5, [(b, 2e-5 + 3e-9 * b) for b in (1e4, 1e5, 1e6)])
    assert (alpha, beta) == pytest.approx((2e-5, 3e-9))
    assert fit_alpha_beta(1.0, [(1e3, 0.5)])[1] > 0  # a timer's noise, not a link that gives time back


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry for the ranks 0 and 2"):
        AlphaBetaProfiler(range(3), nodes([0, 1]))
    with pytest.raises(ValueError, match=r"ctype='x' is unknown; choose one of 'a' \(all_reduce\)"):
        AlphaBetaProfiler(range(2), nodes([0, 1]), ctype="x")
    with pytest.raises(ValueError, match="must name each rank once"):
        AlphaBetaProfiler([0, 0], {})
    with pytest.raises(ValueError, match="repeat >= 1"):
        AlphaBetaProfiler([0], {}, repeat=0)
    with pytest.raises(ValueError, match="beta above 0"):
        AlphaBetaProfiler(range(2), {(0, 1): (1.0, 0.0)})
    with pytest.raises(RuntimeError, match=r"call colossalai\.launch first"):
        AlphaBetaProfiler(range(2))


def _measure(rank: int, world_size: int, port: int) -> object:
    start(rank, world_size, port)
    profiler = AlphaBetaProfiler(range(3), warmup=1, repeat=2, latency_iters=2)
    links = measure_links(Mesh({"a": 3, "b": 1}), Timing(1, 2, 2, (2**16,)))
    assert links["b"].seconds("all_gather", 1000) == 0
    assert links["a"].ranks == 3
    assert links["a"].alpha > 0
    assert profiler.extract_alpha_beta_for_device_mesh()[0][1] > 0
    cpu = measure_cpu(Mesh({"a": 3, "b": 1}), 0.005)
    assert cpu.single > 1e8
    assert cpu.memory > 1e7
    return profiler.alpha_beta_dict, links, cpu


def test_a_measurement_is_the_same_on_all_ranks() -> None:
    found = spawn(_measure, 3)
    assert found[0] == found[1] == found[2]
    table = found[0][0]
    assert sorted(table) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(alpha > 0 and beta > 0 for alpha, beta in table.values())
