from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from colossalai.context import ParallelMode

DOCUMENTED = {
    "GLOBAL": "global",
    "DATA": "data",
    "MODEL": "model",
    "PIPELINE": "pipe",
    "TENSOR": "tensor",
    "SEQUENCE": "sequence",
    "SEQUENCE_DP": "sequence_dp",
    "MOE_MODEL": "moe_model",
    "MOE_DATA": "moe_data",
    "EMBEDDING": "embedding",
    "PARALLEL_1D": "1d",
    "PARALLEL_2D_ROW": "2d_row",
    "PARALLEL_2D_COL": "2d_col",
    "PARALLEL_3D_INPUT": "3d_input",
    "PARALLEL_3D_WEIGHT": "3d_weight",
    "PARALLEL_3D_OUTPUT": "3d_output",
    "PARALLEL_3D_INPUT_X_WEIGHT": "3d_input_x_weight",
    "PARALLEL_3D_OUTPUT_X_WEIGHT": "3d_output_x_weight",
    "PARALLEL_2P5D_ROW": "2p5d_row",
    "PARALLEL_2P5D_COL": "2p5d_col",
    "PARALLEL_2P5D_DEP": "2p5d_dep",
    "PARALLEL_2P5D_XZ": "2p5d_xz",
}


@pytest.fixture
def new_mode() -> Iterator[ParallelMode]:
    mode = ParallelMode.register("NEW_MODE", "new_mode")
    yield mode
    ParallelMode._member_names_.remove("NEW_MODE")
    del ParallelMode._member_map_["NEW_MODE"], ParallelMode._value2member_map_["new_mode"]
    type.__delattr__(ParallelMode, "NEW_MODE")


def test_documented_members() -> None:
    assert {mode.name: mode.value for mode in ParallelMode} == DOCUMENTED


def test_a_registered_mode_is_a_member_like_any_other(new_mode: ParallelMode) -> None:
    assert ParallelMode.NEW_MODE is new_mode  # type: ignore[attr-defined]
    assert ParallelMode["NEW_MODE"] is ParallelMode("new_mode") is new_mode
    assert isinstance(new_mode, ParallelMode)
    assert new_mode in ParallelMode
    assert list(ParallelMode)[-1] is new_mode
    assert len(ParallelMode) == len(DOCUMENTED) + 1
    assert (new_mode.name, new_mode.value, str(new_mode)) == ("NEW_MODE", "new_mode", "ParallelMode.NEW_MODE")
    assert new_mode != ParallelMode.DATA
    assert {new_mode: 1}[new_mode] == 1
    assert copy.deepcopy(new_mode) is pickle.loads(pickle.dumps(new_mode)) is new_mode


def test_registering_again_gives_the_same_member(new_mode: ParallelMode) -> None:
    assert ParallelMode.register("NEW_MODE", "new_mode") is new_mode


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DATA", "mine", r"ParallelMode\.DATA = 'mine' would clash with ParallelMode\.DATA"),
        ("MINE", "data", r"ParallelMode\.MINE = 'data' would clash with ParallelMode\.DATA"),
        ("register", "mine", "needs a name in capitals such as NEW_MODE, got 'register'"),
        ("MY MODE", "mine", "needs a name in capitals such as NEW_MODE, got 'MY MODE'"),
        ("_MINE", "mine", "needs a name in capitals such as NEW_MODE, got '_MINE'"),
        (None, "mine", "needs a name in capitals such as NEW_MODE, got None"),
        ("MINE", "", r"value of ParallelMode\.MINE must be a string such as 'new_mode', got ''"),
        ("MINE", 3, r"value of ParallelMode\.MINE must be a string such as 'new_mode', got 3"),
    ],
)
def test_refused_registrations(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelMode.register(name, value)
    assert len(ParallelMode) == len(DOCUMENTED)
