"""``profile`` and ``recorder``, which tell what ran when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from colossalai.utils import multi_tensor_applier
from colossalai.utils.multi_tensor_apply import multi_tensor_applier as from_its_place
from colossalai.utils.profiler import profile
from colossalai.utils.rank_recorder import RankRecorder, recorder


def test_profile_is_that_of_torch() -> None:
    with profile(engine=object(), record_shapes=True, profile_memory=True) as found:
        torch.ones(3, 4) @ torch.ones(4, 2)
    assert isinstance(found, torch.profiler.profile)
    assert "aten::mm" in {event.key for event in found.key_averages()}
    with pytest.warns(UserWarning, match="profile_stateful_tensor_memory=True has no effect"):
        profile(profile_stateful_tensor_memory=True)


def test_the_recorder_writes_a_trace_for_each_rank(tmp_path: Path) -> None:
    assert isinstance(recorder, RankRecorder)
    own = RankRecorder()
    assert own.dump_record(tmp_path) is None
    with own("forward", 3) as same:
        assert same is own
    with pytest.raises(ValueError, match="inside"), own("backward", 3):
        raise ValueError("inside")
    path = own.dump_record(tmp_path / "records")
    assert path == tmp_path / "records" / "rank_3.json"
    first, second = json.loads(path.read_text())["traceEvents"]
    assert (first["name"], second["name"], first["pid"]) == ("forward", "backward", 3)
    assert first["ts"] + first["dur"] <= second["ts"] + 1
    own.reset()
    assert own.records == []


def test_multi_tensor_apply_has_its_documented_place() -> None:
    assert from_its_place is multi_tensor_applier
