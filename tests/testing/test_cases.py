from __future__ import annotations

import itertools
from typing import Any

import pytest

from colossalai.testing import parametrize_sample, sample_cases


def test_a_sample_is_spread_and_repeatable() -> None:
    sample = sample_cases(range(1000), 10)
    assert sample == sample_cases(range(1000), 10)
    assert [case // 100 for case in sample] == list(range(10)), "one from each tenth"


@pytest.mark.parametrize("n", range(1, 12))
def test_a_sample_has_no_case_twice(n: int) -> None:
    sample = sample_cases(range(11), n)
    assert len(sample) == n
    assert sample == sorted(set(sample))


def test_a_sample_of_all_is_all() -> None:
    assert sample_cases("abc", 3) == sample_cases("abc", 9) == ["a", "b", "c"]


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 8), (3, 5, 2, 2), (2, 2, 2, 2, 2, 2)])
def test_a_sample_of_a_product_meets_every_element_of_every_list(sizes: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    sample = sample_cases(cases, 16)
    assert len(set(sample)) == 16
    for position, size in enumerate(sizes):
        assert {case[position] for case in sample} == set(range(size))


def marked(decorator: pytest.MarkDecorator) -> list[tuple[Any, str | None, bool]]:
    return [(param.values, param.id, bool(param.marks)) for param in decorator.args[1]]


def test_cases_outside_the_sample_are_slow() -> None:
    pairs = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    params = marked(parametrize_sample("number, letter", pairs, 2, ids=["one", "two", "three", "four"]))
    assert [values for values, _, _ in params] == pairs
    assert [slow for _, _, slow in params].count(False) == 2
    assert params[0] == ((1, "a"), "one", False)


def test_single_values_stay_whole() -> None:
    assert marked(parametrize_sample("pair", [(1, 2)], 1)) == [(((1, 2),), None, False)]


def test_ids_must_match() -> None:
    with pytest.raises(ValueError, match="2 cases need as many ids, got 1"):
        parametrize_sample("x", [1, 2], 1, ids=["one"])


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one case, got n=0"):
        sample_cases([1], 0)
