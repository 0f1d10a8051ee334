from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from colossalai import constants
from colossalai.context import (
    Config,
    ConfigException,
    ParallelConfig,
    ParallelMode,
    format_rank_table,
    rank_table,
)
from colossalai.context.tensor_modes import TENSOR_MODES
from colossalai.nn.modes import tensor_parallel

from .tables import TABLES, as_groups


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (None, (None, 1, 1, None)),
        ({}, (None, 1, 1, None)),
        # the forms of the page "Configure Parallelization"
        ({"pipeline": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}, (None, 2, 4, "2d")),
        ({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, (None, 2, 4, "2d")),
        ({"pipeline": 2}, (None, 2, 1, None)),
        ({"tensor": {"size": 4, "mode": "2d"}}, (None, 1, 4, "2d")),
        ({"tensor": {"size": 4, "mode": "1d"}}, (None, 1, 4, "1d")),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, (None, 1, 8, "2.5d")),
        ({"tensor": {"size": 8, "mode": "3d"}}, (None, 1, 8, "3d")),
        ({"pipeline": {"size": 4}}, (None, 4, 1, None)),
        ({"tensor": {"size": 4, "mode": "sequence"}}, (None, 1, 4, "sequence")),
        # the pages about each tensor mode name the data size as well
        ({"data": 1, "pipeline": 1, "tensor": {"size": 2, "mode": "1d"}}, (1, 1, 2, "1d")),
        ({"data": {"size": 2}}, (2, 1, 1, None)),
        # no size is size 1, and size 1 needs no mode
        ({"pipeline": {}, "tensor": {}}, (None, 1, 1, None)),
        ({"tensor": 1}, (None, 1, 1, None)),
        ({"tensor": {"size": 1, "mode": None}}, (None, 1, 1, None)),
        ({"tensor": {"mode": "3d"}}, (None, 1, 1, "3d")),
        (Config(pipeline=2, tensor={"size": 2, "mode": "1d"}), (None, 2, 2, "1d")),
    ],
)
def test_accepted_forms(parallel: Any, expected: tuple[Any, ...]) -> None:
    plan = ParallelConfig.parse(parallel)
    assert (plan.data, plan.pipeline, plan.tensor, plan.mode) == expected


POSITIVE = "must be a positive integer, got"


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"pipeline": 2, "tensor": 4},
            r"tensor has size 4 but no mode; write tensor=dict\(size=4, mode='1d'\)",
        ),
        ({"tensor": {"size": 4}}, "has size 4 but no mode; .* '1d', '2d', '2.5d', '3d', 'sequence'"),
        (4, "parallel must be a dict, got int 4"),
        ({"pipeline": "2"}, f"size of parallel.pipeline {POSITIVE} str '2'"),
        ({"pipeline": 2.0}, f"size of parallel.pipeline {POSITIVE} float 2.0"),
        ({"pipeline": True}, f"size of parallel.pipeline {POSITIVE} bool True"),
        ({"pipeline": 0}, f"size of parallel.pipeline {POSITIVE} int 0"),
        ({"pipeline": None}, f"size of parallel.pipeline {POSITIVE} NoneType None"),
        ({"pipeline": {"size": -2}}, f"size of parallel.pipeline {POSITIVE} int -2"),
        ({"data": 0}, f"size of parallel.data {POSITIVE} int 0"),
        ({"tensor": [4, "2d"]}, rf"size of parallel.tensor {POSITIVE} list \[4, '2d'\]"),
        ({"tensor": {"size": -4, "mode": "1d"}}, f"size of parallel.tensor {POSITIVE} int -4"),
        ({"tensor": {"size": True, "mode": "1d"}}, f"size of parallel.tensor {POSITIVE} bool True"),
        ({"tensor": {"size": 4, "mode": 2}}, "tensor.mode 2 is unknown: .*known: '1d', '2.5d', '2d'"),
        ({"tensor": {"size": 4, "mode": "2D"}}, "tensor.mode '2D' is unknown: did you mean '2d'"),
        ({"tensor": {"size": 8, "mode": "2p5d"}}, "tensor.mode '2p5d' is unknown: did you mean '2.5d'"),
        ({"tensor": {"size": 4, "mode": "data"}}, "tensor.mode 'data' is unknown"),
        (
            {"tensor": {"size": 8, "mode": "2d"}},
            "'2d' does not fit: size 8 is not a square number; use 4 or 9",
        ),
        (
            {"tensor": {"size": 4, "mode": "3d"}},
            "'3d' does not fit: size 4 is not a cubic number; use 1 or 8",
        ),
        ({"tensor": {"size": 9, "mode": "3d"}}, "size 9 is not a cubic number; use 8 or 27"),
        ({"tensor": {"size": 8, "mode": "2.5d"}}, r"mode '2.5d' needs 'depth', as in tensor=dict\(size=8"),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 3}}, "size 8 cannot be divided by depth 3"),
        (
            {"tensor": {"size": 16, "mode": "2.5d", "depth": 2}},
            "size / depth = 16 / 2 = 8 is not a square number; with depth 2 use 8 or 18",
        ),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 0}}, f"parallel.tensor.depth {POSITIVE} int 0"),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": "2"}}, f"parallel.tensor.depth {POSITIVE} str '2'"),
        (
            {"tensor": {"size": 8, "mode": "3d", "depth": 2}},
            "parallel.tensor has an unknown key 'depth': .*'mode', 'size'",
        ),
        ({"tensors": 1}, "parallel has an unknown key 'tensors': did you mean 'tensor'"),
        ({"piepline": 2}, "parallel has an unknown key 'piepline': did you mean 'pipeline'"),
        ({"qqqq": 2}, "unknown key 'qqqq': known: 'data', 'moe', 'pipeline', 'sequence', 'tensor'"),
        ({"sequence": 0}, f"size of parallel.sequence {POSITIVE} int 0"),
        ({"sequence": {"size": 2, "attentoin": "ring"}}, "unknown key 'attentoin': did you mean 'attention'"),
        (
            {"sequence": {"size": 2, "attention": "rings"}},
            "attention 'rings' is unknown: did you mean 'ring'",
        ),
        ({"sequence": {"size": 4, "ulysses": 2}}, "but attention is 'ring'; leave ulysses out"),
        ({"sequence": {"size": 4, "attention": "both", "ulysses": 0}}, f"sequence.ulysses {POSITIVE} int 0"),
        ({"sequence": {"size": 3, "attention": "both"}}, "size 3 cannot be divided by ulysses=2"),
        ({"sequence": {"attention": "ulysses"}}, "has no size, so nothing would be cut; write sequence=dict"),
        ({"sequence": {"sizes": 2}}, "parallel.sequence has an unknown key 'sizes': did you mean 'size'"),
        (
            {"sequence": {"size": 1, "attention": "ulysses"}, "tensor": {"size": 2, "mode": "sequence"}},
            r"'ulysses' beside tensor mode 'sequence', .* sequence=dict\(size=2, attention='ulysses'\)",
        ),
        (
            {"sequence": 2, "tensor": {"size": 2, "mode": "sequence"}},
            "size 2 beside tensor mode 'sequence': it cuts the sequence already",
        ),
        (
            {"sequence": 2, "tensor": {"size": 4, "mode": "2d"}},
            "beside tensor mode '2d': it cuts rows by its own axes; cut sequences go with",
        ),
        (
            {"sequence": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}},
            "beside parallel.tensor.sequence_parallel=True, which cuts the same sequence",
        ),
        ({"pipeline": {"sizes": 2}}, "parallel.pipeline has an unknown key 'sizes': did you mean 'size'"),
        (
            {"tensor": {"size": 4, "mod": "2d"}},
            "parallel.tensor has an unknown key 'mod': did you mean 'mode'",
        ),
        ({"tensor": {"size": 4, "Mode": "2d"}}, "unknown key 'Mode': did you mean 'mode'"),
        ({"tensor": {"size": 8, "depth": 2}}, "has size 8 but no mode"),
        ({"tensor": {"mod": "2d"}}, "parallel.tensor has an unknown key 'mod': did you mean 'mode'"),
        ({"tensor": {"size": 8, "mode": "2.5d", "dept": 2}}, "unknown key 'dept': did you mean 'depth'"),
    ],
)
def test_refused_forms(parallel: Any, message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        ParallelConfig.parse(parallel)


def test_the_data_size_fills_the_world() -> None:
    plan = ParallelConfig.parse({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}).fit(16)
    assert plan.data == 2
    assert plan.axes == {"dp": 2, "pp": 2, "row": 2, "col": 2}


@pytest.mark.parametrize(
    ("parallel", "axes", "attention"),
    [
        ({"sequence": 4}, {"sp": 4}, ("sp", None)),
        ({"sequence": {"size": 4, "attention": "ulysses"}}, {"sp": 4}, (None, "sp")),
        ({"sequence": {"size": 4, "attention": "both"}}, {"sp": 2, "su": 2}, ("sp", "su")),
        ({"sequence": {"size": 8, "attention": "both", "ulysses": 4}}, {"sp": 2, "su": 4}, ("sp", "su")),
        ({"sequence": 1}, {}, (None, None)),
        ({"tensor": {"size": 4, "mode": "sequence"}}, {"sp": 4}, ("sp", None)),
        ({"tensor": {"size": 2, "mode": "1d"}}, {}, (None, None)),
    ],
)
def test_the_axes_of_a_cut_sequence(parallel: Any, axes: dict[str, int], attention: tuple[Any, Any]) -> None:
    plan = ParallelConfig.parse({"pipeline": 2, **parallel}).fit(16)
    assert plan.sequence_axes == axes
    assert (plan.ring_axis, plan.heads_axis) == attention
    # beside 1D the tensor ranks stay neighbours
    tensor = {"tp": plan.tensor} if plan.mode != "sequence" else {}
    assert list(plan.axes.items()) == list({"dp": plan.data, "pp": 2, **axes, **tensor}.items())


def test_the_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig.parse(None).pipeline = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        (
            {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
            6,
            "the world size 6 is not a multiple of pipeline 2 x tensor 2 = 4; start a multiple of 4"
            " processes",
        ),
        ({"pipeline": 8}, 4, "the world size 4 is not a multiple of pipeline 8 x tensor 1 = 8"),
        (
            {"data": 3, "pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
            8,
            "data 3 x pipeline 2 x tensor 2 = 12, but the world size is 8; start 12 processes, or leave"
            " parallel.data",
        ),
        ({"data": 1}, 2, "data 1 x pipeline 1 x tensor 1 = 1, but the world size is 2"),
        (
            {"sequence": 4},
            6,
            "6 is not a multiple of pipeline 1 x sequence 4 x tensor 1 = 4; .*, parallel.sequence or",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_world_show_the_arithmetic(
    parallel: Any, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigException, match=message):
        ParallelConfig.parse(parallel).fit(world_size)


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_rank_tables(case: Any) -> None:
    table = rank_table(case.parallel, case.world_size)
    assert {mode.name: groups for mode, groups in table.items()} == as_groups(case)


@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_the_order_of_the_axes_is_seen_in_the_table(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that the tables above must catch: two axes swapped."""
    case = next(c for c in TABLES if c.parallel.get("tensor", {}).get("mode") == mode)
    axes = TENSOR_MODES[mode].axes
    swapped = dataclasses.replace(TENSOR_MODES[mode], axes=(*axes[:-2], axes[-1], axes[-2]))
    monkeypatch.setitem(TENSOR_MODES, mode, swapped)
    table = rank_table(case.parallel, case.world_size)
    assert {m.name: groups for m, groups in table.items()} != as_groups(case)


@pytest.mark.parametrize(
    ("mode", "size", "depth"), [("1d", 4, 1), ("2d", 9, 1), ("2.5d", 8, 2), ("3d", 27, 1)]
)
def test_the_layers_mean_the_same_axes(mode: str, size: int, depth: int) -> None:
    options = {"depth": depth} if mode == "2.5d" else {}
    plan = ParallelConfig.parse({"tensor": dict(size=size, mode=mode, **options)}).fit(size)
    assert list(plan.axes.items())[2:] == list(tensor_parallel(mode, size, depth).axes.items())


def test_the_table_as_text() -> None:
    text = format_rank_table(rank_table({"tensor": {"size": 2, "mode": "1d"}}, 4))
    assert text.splitlines() == [
        "GLOBAL       (0,1,2,3)",
        "DATA         (0,2) (1,3)",
        "MODEL        (0,1) (2,3)",
        "PIPELINE     (0) (1) (2) (3)",
        "TENSOR       (0,1) (2,3)",
        "PARALLEL_1D  (0,1) (2,3)",
    ]


def test_a_mode_of_the_user_is_known_once_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"tensor": {"size": 3, "mode": "new_mode", "anything": object()}}
    with pytest.raises(ConfigException, match=r"a mode of your own needs a row in colossalai\.constants"):
        ParallelConfig.parse(section)
    monkeypatch.setitem(constants.INITIALIZER_MAPPING, "new_mode", "MyParallelInitializer")
    plan = ParallelConfig.parse(section).fit(6)
    assert plan.axes == {"dp": 2, "pp": 1, "tp": 3}
    assert list(plan.options) == ["anything"]
    assert rank_table(plan, 6)[ParallelMode.TENSOR] == [[0, 1, 2], [3, 4, 5]]


def test_constants() -> None:
    assert list(TENSOR_MODES) == constants.ALLOWED_MODES
    assert constants.TENSOR_PARALLEL_ATTRIBUTES == ["is_tensor_parallel", "num_partitions"]


def test_experts_are_shared_out_over_data_ranks() -> None:
    """The figure of page 07: four ranks, of which two share the experts out."""
    table = rank_table({"moe": {"size": 2}}, 4)
    assert table[ParallelMode.DATA] == [[0, 1, 2, 3]]
    assert table[ParallelMode.MOE_MODEL] == [[0, 1], [2, 3]]
    assert table[ParallelMode.MOE_DATA] == [[0, 2], [1, 3]]
    axes = ParallelConfig.parse({"moe": 12, "tensor": {"size": 2, "mode": "1d"}}).fit(48).axes
    assert axes == {"dp": 2, "ep": 3, "ep1": 2, "ep2": 2, "pp": 1, "tp": 2}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"moe": {"size": 3}}, "parallel.moe has size 3, which does not divide the 4 data-parallel ranks"),
        ({"moe": 0}, "the size of parallel.moe must be a positive integer, got int 0"),
        ({"moe": {"sizes": 2}}, "parallel.moe has an unknown key 'sizes'"),
    ],
)
def test_wrong_numbers_of_expert_ranks(parallel: Any, message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        ParallelConfig.parse(parallel).fit(4)
