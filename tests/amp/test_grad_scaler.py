from __future__ import annotations

import math

import pytest

from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler, ConstantGradScaler, DynamicGradScaler
from tests.amp.tools import logged


def _scales(scaler: BaseGradScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is a step that overflowed."""
    scales = []
    for step in overflows:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def test_a_constant_scale_stays() -> None:
    assert _scales(ConstantGradScaler(8, verbose=False), "..x.x") == [8] * 5


def test_the_scale_grows_after_good_steps_in_a_row() -> None:
    scaler = DynamicGradScaler(4, growth_interval=2, hysteresis=1)
    assert _scales(scaler, "...x..") == [4, 8, 8, 4, 4, 8]
    assert scaler.inv_scale == 1 / 8


def test_hysteresis_forgives_overflows_until_the_scale_grew() -> None:
    scaler = DynamicGradScaler(64, growth_interval=3, hysteresis=2)
    #                        forgiven, back off, back off, grow, forgiven again, back off
    assert _scales(scaler, "x.xx...x.x") == [64, 64, 32, 16, 16, 16, 32, 32, 32, 16]


def test_bounds_hold() -> None:
    scaler = DynamicGradScaler(4, growth_interval=1, min_scale=2, max_scale=10, hysteresis=1)
    assert _scales(scaler, "..xxxx") == [8, 10, 5, 2.5, 2, 2]


def test_without_a_floor_the_scale_never_becomes_zero() -> None:
    scaler = DynamicGradScaler(1, hysteresis=1)
    assert 0 < _scales(scaler, "x" * 3000)[-1] < 1e-20


@pytest.mark.parametrize("saved", range(1, 9))
def test_a_saved_scale_goes_on_exactly(saved: int) -> None:
    steps = "x..x..xx....x"
    whole = DynamicGradScaler(64, growth_interval=3)
    _scales(whole, steps[:saved])
    other = DynamicGradScaler(1, growth_interval=3)
    other.load_state_dict(whole.state_dict())
    assert _scales(other, steps[saved:]) == _scales(whole, steps[saved:])


def test_changes_are_logged_if_asked_for() -> None:
    with logged() as lines:
        _scales(DynamicGradScaler(4, growth_interval=1, hysteresis=1), ".x")
        assert lines == []
        _scales(DynamicGradScaler(4, growth_interval=1, hysteresis=1, verbose=True), ".x")
    assert [line for line in lines if "scale" in line and "->" in line] == [
        "loss scale 4 -> 8 after 1 good steps",
        "loss scale 8 -> 4 after an overflow",
    ]


def test_senseless_options_are_refused() -> None:
    for scale in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="ConstantGradScaler needs a finite initial_scale above 0"):
            ConstantGradScaler(scale)
    with pytest.raises(ValueError, match=r"growth_factor > 1.*hysteresis >= 1; got 2, 2, 1000, 2"):
        DynamicGradScaler(backoff_factor=2)
    with pytest.raises(ValueError, match=r"hysteresis >= 1; got 2, 0.5, 1000, 0"):
        DynamicGradScaler(hysteresis=0)
    with pytest.raises(ValueError, match=r"min_scale <= initial_scale <= max_scale, got None <= 65536 <= 4"):
        DynamicGradScaler(max_scale=4)
