"""Timetables without a process group: what they cost, what they store, and that they end."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from colossalai.context.parallel_config import ParallelConfig
from colossalai.pipeline.schedule import (
    BUBBLES,
    SCHEDULES,
    Action,
    PassKind,
    Timetable,
    bubble_formula,
    make_timetable,
    price,
)
from colossalai.pipeline.stage import Placement, Shape

RANKS, MICROBATCHES = (1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 12, 21)
CHUNKS = {"interleaved": (1, 2, 3), "gpipe": (1, 2, 3), "zbv": (2,)}
PAGE = Path(__file__).parents[2] / "docs/source/en" / "pipeline.md"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_formulas_are_those_of_the_timetables(name: str) -> None:
    for p, m, c in itertools.product(RANKS, (*MICROBATCHES, 28), CHUNKS.get(name, (1,))):
        if name == "interleaved" and m % p:
            continue
        table = make_timetable(name, p, m, c)
        formula = bubble_formula(table)
        assert (formula is None) is (name == "zbv" and m < 2 * p - 1)
        assert formula is None or price(table).bubble == pytest.approx(formula)
    assert bubble_formula(table.forward_only(2)) is None


DOCUMENTED = re.findall(
    r"^\| `(\w+)` \| [^|]+ \| ([^|]+?)(?:, if ([^|]+))? \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE
)


def _evaluated(formula: str, p: int, m: int, c: int) -> float:
    """A formula of the page, in which a space between a factor and a name multiplies."""
    return eval(re.sub(r"(?<=[\dc]) (?=[mp])", "*", formula), {"p": p, "m": m, "c": c})


def test_the_formulas_are_those_of_the_page() -> None:
    assert [name for name, *_ in DOCUMENTED] == list(BUBBLES)
    for name, formula, condition in DOCUMENTED:
        for p, m, c in itertools.product((2, 3, 4, 7), MICROBATCHES, CHUNKS.get(name, (1,))):
            if not condition or _evaluated(condition, p, m, c):
                assert BUBBLES[name](p, m, c) == pytest.approx(_evaluated(formula, p, m, c)), name


def test_zero_bubble_is_below_1f1b() -> None:
    for p, m in itertools.product((2, 3, 4), (8, 12, 21)):
        old, h1, v = (price(make_timetable(n, p, m, c)) for n, c in (("1f1b", 1), ("zbh1", 1), ("zbv", 2)))
        assert v.bubble < h1.bubble < old.bubble
        stored = [make_timetable("zbv", p, m, 2).peak_stored(r) for r in range(p)]
        assert max(stored) <= 2 * p
        assert {make_timetable("zbh1", p, m).peak_stored(r) for r in range(p)} == {p}


def test_stored_activations() -> None:
    for p, m in itertools.product(RANKS, MICROBATCHES):
        assert [make_timetable("gpipe", p, m).peak_stored(r) for r in range(p)] == [m] * p
        assert [make_timetable("1f1b", p, m).peak_stored(r) for r in range(p)] == [
            min(m, p - r) for r in range(p)
        ]
        if m % p == 0:
            table = make_timetable("interleaved", p, m, 2)
            assert [table.peak_stored(r) for r in range(p)] == [
                min(2 * m, 2 * (p - r - 1) + p + 1) for r in range(p)
            ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_is_done_once_and_in_order(name: str) -> None:
    for p, groups, c in itertools.product((1, 2, 3, 4), (1, 2, 3), CHUNKS.get(name, (1,))):
        table = make_timetable(name, p, p * groups, c)
        price(table, message=0.3)  # it ends
        for row in table.ranks:
            assert len(set(row)) == len(row)
            forward = {(a.chunk, a.microbatch) for a in row if a.kind is PassKind.FORWARD}
            assert forward == set(itertools.product(range(c), range(p * groups)))
            for chunk, kinds in itertools.product(
                range(c), (PassKind.BACKWARD, PassKind.INPUT_GRAD, PassKind.WEIGHT_GRAD)
            ):
                done = [a.microbatch for a in row if a.kind is kinds and a.chunk == chunk]
                assert done in ([], list(range(p * groups)))


def test_a_timetable_that_never_ends_is_found() -> None:
    row = (Action(PassKind.FORWARD, 0), Action(PassKind.BACKWARD, 0))
    stuck = Timetable("stuck", Placement(2), 1, (row[::-1], row))
    with pytest.raises(
        ValueError, match="the schedule stuck never ends: rank 0 waits before B0, rank 1 waits before F0"
    ):
        price(stuck)


def test_printed() -> None:
    assert str(make_timetable("1f1b", 2, 3)) == (
        "1f1b, 3 micro-batches\nrank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"
    )
    assert "rank 1: F0 F1 F0.1 B0.1 F1.1" in str(make_timetable("interleaved", 2, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "there is no pipeline schedule '2f2b'; there are gpipe, 1f1b, interleaved"),
        (("1f1b", 2, 0), "number of micro-batches as a whole number of at least 1, got 0"),
        (("gpipe", 2, 2, True), "number of chunks as a whole number of at least 1, got True"),
        (("1f1b", 2, 2, 2), "1f1b has one chunk for each rank, got 2; use the schedule 'interleaved'"),
        (("zbh1", 2, 2, 2), "zbh1 has one chunk for each rank, got 2; use the schedule 'zbv'"),
        (("zbv", 2, 2, 1), "zbv has two chunks for each rank, got 1; set NUM_CHUNKS to 2"),
        (("interleaved", 4, 6, 2), "multiple of the 4 pipeline stages, got 6; change NUM_MICRO_BATCHES"),
    ],
)
def test_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_timetable(*arguments)


def test_the_config_knows_the_shape_of_every_schedule() -> None:
    for name in SCHEDULES:
        shape = make_timetable(name, 2, 2, CHUNKS.get(name, (1,))[0]).placement.shape
        assert (shape is Shape.VEE) is ParallelConfig(schedule=name).is_vee


@pytest.mark.parametrize("shape", Shape)
def test_placement(shape: Shape) -> None:
    place = Placement(4, 2, shape)
    assert sorted(place.stage(r, c) for r in range(4) for c in range(2)) == list(range(8))
    assert all(place.stage(place.rank(s), place.chunk(s)) == s for s in range(8))
    assert place.loss_rank == (3 if shape is Shape.LOOP else 0)
