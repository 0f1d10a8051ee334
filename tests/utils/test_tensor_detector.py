from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from colossalai.utils import TensorDetector


def _lines(detector: TensorDetector, capsys: pytest.CaptureFixture[str]) -> list[str]:
    detector.detect()
    return capsys.readouterr().out.splitlines()


def test_what_came_and_what_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Linear(3, 2)
    detector = TensorDetector(log=tmp_path / "log", include_cpu=True, module=module)
    first = _lines(detector, capsys)
    assert any(line.startswith("+ weight") and "2x3" in line and line.endswith("grad") for line in first)
    assert any(line.startswith("+ bias") for line in first)
    assert first[-1].startswith("= ")

    assert len(_lines(detector, capsys)) == 1  # nothing changed

    big = torch.ones(2**18)
    view = big[:10]
    came = _lines(detector, capsys)
    assert [line[0] for line in came] == ["+", "+", "="]
    assert any("262144" in line and "1.000 MB" in line for line in came)
    assert _held(came) - _held(first) == pytest.approx(1.0, abs=0.01)  # a view holds nothing of its own

    del big, view
    module(torch.ones(1, 3)).sum().backward()
    changed = _lines(detector, capsys)
    assert sum(line.startswith("- Tensor") for line in changed) == 2
    assert any(line.startswith("+ weight.grad") and "2x3" in line for line in changed)
    assert (tmp_path / "log").read_text().splitlines() == first + first[-1:] + came + changed

    detector.close()
    assert sum(line.startswith("+ weight ") for line in _lines(detector, capsys)) == 1


def test_log_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDetector(show_info=False, log=tmp_path / "log").detect()
    assert capsys.readouterr().out == ""
    assert "tensors hold" in (tmp_path / "log").read_text()
    with pytest.raises(
        ValueError, match="TensorDetector would be silent: use show_info=True or name a log file"
    ):
        TensorDetector(show_info=False)


@pytest.mark.gpu
def test_cpu_tensors_are_left_out_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    kept = (torch.ones(77), torch.ones(78, device="cuda"))
    lines = _lines(TensorDetector(), capsys)
    assert not any(" 77 " in line for line in lines)
    assert any(" 78 " in line and "cuda:0" in line for line in lines)
    del kept


def _held(lines: list[str]) -> float:
    return float(lines[-1].split("hold ")[1].split()[0])


def test_fake_tensors_hold_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    detector = TensorDetector(include_cpu=True)
    with FakeTensorMode():
        fake = torch.empty(123, 457)
    detector.detect()
    assert "457" not in capsys.readouterr().out
    assert fake.shape == (123, 457)
