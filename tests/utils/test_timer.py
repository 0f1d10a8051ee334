from __future__ import annotations

import time

import pytest
import torch

from colossalai.utils import MultiTimer, Timer
from colossalai.utils.timer import MultiTimer as DocumentedMultiTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_elapsed_time_and_history(clock: list[float]) -> None:
    timer = Timer()
    assert not timer.has_history
    for seconds in (1.0, 3.0):
        timer.start()
        clock[0] += seconds
        assert timer.lap() == seconds
        assert timer.stop(keep_in_history=True) == seconds
    timer.start()
    clock[0] += 10
    timer.stop()
    assert timer.get_elapsed_time() == 10
    assert (timer.get_history_sum(), timer.get_history_mean(), timer.has_history) == (4, 2, True)
    timer.reset()
    assert (timer.get_elapsed_time(), timer.get_history_sum(), timer.has_history) == (0, 0, False)


def test_a_second_start_counts_anew(clock: list[float]) -> None:
    timer = Timer()
    timer.start()
    clock[0] += 5
    timer.start()
    clock[0] += 1
    assert timer.stop() == 1


def test_misuse_is_explained() -> None:
    timer = Timer()
    with pytest.raises(RuntimeError, match=r"not running; call start\(\) before lap\(\) or stop\(\)"):
        timer.stop()
    timer.start()
    timer.stop()
    with pytest.raises(RuntimeError, match="not running"):
        timer.stop()
    with pytest.raises(RuntimeError, match=r"no history; call stop\(keep_in_history=True\)"):
        timer.get_history_mean()


def test_timers_by_name(clock: list[float]) -> None:
    timers = DocumentedMultiTimer()
    for name, seconds in (("Train-step", 1.0), ("Train-epoch", 2.0)):
        timers.start(name)
        clock[0] += seconds
        assert timers.stop(name, keep_in_history=True) == seconds
    assert timers.get_timer("Train-step").get_history_mean() == 1
    assert [(name, timer.get_elapsed_time()) for name, timer in timers] == [
        ("Train-step", 1),
        ("Train-epoch", 2),
    ]
    timers.reset("Train-step")
    assert [timer.has_history for _, timer in timers] == [False, True]
    timers.reset()
    assert [timer.has_history for _, timer in timers] == [False, False]
    with pytest.raises(ValueError, match="no timer 'Train-steps' was started; did you mean 'Train-step'"):
        timers.stop("Train-steps")
    with pytest.raises(ValueError, match="no timer 'x' was started; there are: none"):
        MultiTimer().get_timer("x")


def test_timers_that_are_off_do_nothing() -> None:
    timers = MultiTimer(on=False)
    timers.start("step")
    assert timers.stop("step") == 0
    assert list(timers) == []
    assert not timers.is_on()
    timers.set_status(True)
    timers.start("step")
    assert timers.is_on()
    assert timers.stop("step") > 0


@pytest.mark.parametrize("in_use", [False, True])
def test_cuda_is_waited_for_only_when_in_use(monkeypatch: pytest.MonkeyPatch, in_use: bool) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    timer = Timer()
    timer.start()
    timer.stop()
    assert len(waits) == (2 if in_use else 0)
