"""The profiler and the recorder of ranks, by their documented names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from colossalai.utils import multi_tensor_apply
from colossalai.utils.common import multi_tensor_applier
from colossalai.utils.profiler import profile
from colossalai.utils.rank_recorder import RankRecorder, recorder


def test_the_profiler_is_that_of_torch() -> None:
    with (
        pytest.warns(UserWarning, match="profile_stateful_tensor_memory has no effect"),
        profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            engine=None,
            profile_stateful_tensor_memory=True,
        ) as seen,
    ):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert any(event.key == "aten::mm" for event in seen.key_averages())


def test_blocks_are_recorded(tmp_path: Path) -> None:
    assert isinstance(recorder, RankRecorder)
    own = RankRecorder()
    with own("load", 0), own("read", 1):
        pass
    with pytest.raises(KeyError), own("fails", 0):
        raise KeyError
    assert [(span.name, span.rank) for span in own.spans] == [("read", 1), ("load", 0), ("fails", 0)]
    assert all(span.end >= span.start for span in own.spans)
    own.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["name"], event["pid"], event["ph"]) for event in events][1] == ("load", 0, "X")


def test_the_documented_place_of_multi_tensor_applier() -> None:
    assert multi_tensor_apply.multi_tensor_applier is multi_tensor_applier
