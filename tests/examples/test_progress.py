"""Progress on a terminal, in a log file, and on ranks that should be silent."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

import progress


def show(active: bool) -> None:
    with progress.Progress(0, 100, active=active) as shown:
        for step in range(1, 101):
            shown.update(step, 100, loss=step / 10)
        shown.note("half time")


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(active=True)
    captured = capsys.readouterr()
    # the first, since nothing was shown before, and the last; between them less than five seconds passed
    assert captured.out.splitlines() == [
        "step     1/100   train loss 0.100",
        "step   100/100   train loss 10.000",
        "half time",
    ]
    assert "\r" not in captured.err


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show(active=True)
    captured = capsys.readouterr()
    assert "100/100" in captured.err
    assert "train loss 10.000" in captured.err
    assert captured.out == "half time\n"


def test_silence_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    show(active=False)
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_is_noted_and_later_interrupts_again() -> None:
    with progress.StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
