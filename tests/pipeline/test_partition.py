"""Cutting a sequence of layers into the parts of pipeline stages."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from colossalai.pipeline.partition import customized_partition, partition_balanced, partition_uniform
from colossalai.pipeline.stage import Shape


def in_order(parts: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The parts in the order of the model: chunk by chunk, in each from the first rank to the last."""
    return [part for chunk in zip(*parts, strict=True) for part in chunk]


def all_cuts(items: int, count: int) -> Iterator[list[tuple[int, int]]]:
    for inner in itertools.combinations(range(1, items), count - 1):
        yield list(itertools.pairwise((0, *inner, items)))


@pytest.mark.parametrize("items", [1, 2, 5, 12, 13])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2)])
def test_uniform_parts_differ_by_one_layer(items: int, stages: int, chunks: int) -> None:
    if items < stages * chunks:
        with pytest.raises(ValueError, match=rf"the model has {items} layers, but {stages} pipeline stages"):
            partition_uniform(items, stages, chunks)
        return
    parts = in_order(partition_uniform(items, stages, chunks))
    assert [i for start, end in parts for i in range(start, end)] == list(range(items))
    sizes = {end - start for start, end in parts}
    assert max(sizes) - min(sizes) <= 1


def test_chunks_are_dealt_in_turn() -> None:
    """Page 41: device 1 has the layers 1, 2, 9, 10, device 2 has 3, 4, 11, 12, and so on."""
    assert partition_uniform(16, 4, 2)[0] == [(0, 2), (8, 10)]
    assert partition_uniform(16, 4, 2)[1] == [(2, 4), (10, 12)]


def test_chunks_of_a_vee_come_back() -> None:
    vee = Shape.VEE
    assert partition_uniform(16, 4, 2, shape=vee)[0] == [(0, 2), (14, 16)]
    assert partition_uniform(16, 4, 2, shape=vee)[3] == [(6, 8), (8, 10)]
    assert partition_balanced([1, 1, 1, 1], 2, 2, shape=vee) == [[(0, 1), (3, 4)], [(1, 2), (2, 3)]]
    cut = ["a", "SPLIT_NODE", "b", "SPLIT_NODE", "c", "SPLIT_NODE", "d"]
    assert customized_partition(cut, 2, 2, shape=vee) == [[(0, 1), (3, 4)], [(1, 2), (2, 3)]]


def test_balanced_is_optimal() -> None:
    draw = random.Random(0)
    for _ in range(150):
        weights = [draw.choice([0, 1, 2, 3, 7, 20, 0.5]) for _ in range(draw.randint(1, 9))]
        count = draw.randint(1, len(weights))

        def badness(parts: list[tuple[int, int]], weights: list[float] = weights) -> tuple[float, float]:
            loads = [sum(weights[start:end]) for start, end in parts]
            return max(loads), sum(load**2 for load in loads)

        found = in_order(partition_balanced(weights, count, 1))
        assert found in list(all_cuts(len(weights), count))
        assert badness(found) == min(map(badness, all_cuts(len(weights), count)))


def test_balanced_with_chunks_and_one_heavy_layer() -> None:
    assert partition_balanced([1, 1, 1, 1], 2, 2) == [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    # a vocabulary before eight blocks: the uniform cut would give the first stage far more than its share
    assert partition_balanced([6, *[1] * 8], 2, 1) == [[(0, 2)], [(2, 9)]]


def test_balanced_refuses_bad_weights() -> None:
    with pytest.raises(ValueError, match=r"weights of layers must be numbers of at least 0, got \[1, -1\]"):
        partition_balanced([1, -1], 2, 1)
    with pytest.raises(ValueError, match="numbers of at least 0"):
        partition_balanced([1, float("nan")], 2, 1)
    for wrong in ("123", 5, None, ["a", "b"]):
        with pytest.raises(ValueError, match=rf"at least 0, got {re.escape(repr(wrong))}"):
            partition_balanced(wrong, 2)  # type: ignore[arg-type]


def test_customized() -> None:
    sequence = ["a", (len, "behind"), "SPLIT_NODE", "b", len, "c", "SPLIT_NODE", "d", "SPLIT_NODE", "e"]
    assert customized_partition(sequence) == [[(0, 1)], [(1, 3)], [(3, 4)], [(4, 5)]]
    assert customized_partition(sequence, 2, 2) == [[(0, 1), (3, 4)], [(1, 3), (4, 5)]]
    with pytest.raises(
        ValueError, match=r"has 3 'SPLIT_NODE', which make 4 parts, but 3 pipeline stages .* need 3"
    ):
        customized_partition(sequence, 3)
    with pytest.raises(ValueError, match="part 1 of exec_seq has no layer"):
        customized_partition(["a", "SPLIT_NODE", "SPLIT_NODE", "b", "c"])


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="the number of stages as a whole number of at least 1, got 0"):
        partition_uniform(4, 0, 1)


@pytest.mark.parametrize("wrong", ["2", 2.0, None, True, -1, [2]])
def test_numbers_that_are_none(wrong: Any) -> None:
    told = rf"the number of {{}} as a whole number of at least 1, got {re.escape(repr(wrong))}"
    with pytest.raises(ValueError, match=told.format("layers")):
        partition_uniform(wrong, 2, 1)
    with pytest.raises(ValueError, match=told.format("stages")):
        partition_balanced([1, 1], wrong, 1)
    with pytest.raises(ValueError, match=told.format("chunks")):
        customized_partition(["a", "SPLIT_NODE", "b"], 2, wrong)


@pytest.mark.parametrize("wrong", ["ab", None, 3])
def test_an_exec_seq_that_is_no_list(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"exec_seq must be a list of the names of layers.* got {wrong!r}"):
        customized_partition(wrong, 2)
