"""Modes by their documented names."""

from __future__ import annotations

from typing import Any

import pytest

from colossalai.context.config import ConfigException
from colossalai.context.parallel_config import ParallelConfig
from colossalai.mesh import Layout
from colossalai.nn.modes import at_rank, mode_1d, mode_2d, mode_2p5d, mode_3d, mode_serial, tensor_parallel


def test_modes_by_name() -> None:
    assert tensor_parallel(None) == mode_serial()
    assert tensor_parallel("1d", 4) == mode_1d(4)
    assert tensor_parallel("2d", 9) == mode_2d(3)
    assert tensor_parallel("2.5d", 12, depth=3) == mode_2p5d(2, 3)
    assert tensor_parallel("3d", 27) == mode_3d(3)


@pytest.mark.parametrize(
    ("mode", "size", "message"),
    [
        ("4d", 4, "unknown tensor-parallel mode '4d'; the modes are None, '1d', '2d', '2.5d', '3d'"),
        ("2d", 8, "mode '2d': size 8 is not a square number; use 4 or 9"),
        ("2.5d", 8, r"mode '2.5d': size / depth = 8 / 1 = 8 is not a square number"),
        ("3d", 9, "mode '3d': size 9 is not a cubic number; use 8 or 27"),
    ],
)
def test_sizes_that_do_not_fit_a_mode(mode: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_parallel(mode, size)


def test_sequence_parallelism_belongs_to_1d() -> None:
    assert tensor_parallel("1d", 2, sequence_parallel=True).hidden == Layout(((), ("tp",), ()))
    with pytest.raises(ValueError, match="mode '2d' has no sequence_parallel; mode '1d' has"):
        tensor_parallel("2d", 4, sequence_parallel=True)


def test_activations_of_other_ranks() -> None:
    hidden = mode_1d(2, sequence_parallel=True).hidden
    assert at_rank(hidden, 2).dims == ((), ())  # no sequence, so nothing is cut
    assert at_rank(hidden, 5).dims == ((), ("tp",), (), (), ())
    with pytest.raises(ValueError, match="a tensor of 1 dims cannot hold a batch of features"):
        at_rank(hidden, 1)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"size": 2, "mode": "1d", "sequence_parallel": 1}, "sequence_parallel must be True or False, got 1"),
        ({"size": 4, "mode": "2d", "sequence_parallel": True}, "unknown key 'sequence_parallel'"),
    ],
)
def test_the_word_in_the_config(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        ParallelConfig.parse({"tensor": tensor})
    plan = ParallelConfig.parse({"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}})
    assert (plan.options, plan.group_options) == ({"sequence_parallel": True}, {})
