"""Every schedule against its formula, written here once more, step by step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper
from colossalai.nn import lr_scheduler as lrs
from colossalai.registry import LR_SCHEDULERS

BASE = (0.1, 0.03)  # the learning rates of two parameter groups
TOTAL = 12


def _cos(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


def _product(step: int) -> float:
    return math.prod(0.5 + 0.1 * k for k in range(1, step + 1))


def _warm(warmup: int, then: Callable[[float, int], float]) -> Callable[[float, int], float]:
    return lambda b, t: b * (t + 1) / warmup if t < warmup else then(b, t)


def _one_cycle(b: float, t: int) -> float:
    t, peak = min(t, 11), 0.25 * 12 - 1
    if t <= peak:
        return b / 10 + (b - b / 10) * t / peak
    return b + (b / 1000 - b) * (t - peak) / (11 - peak)


# name and arguments of a scheduler, rate(base, step)
CASES: dict[str, tuple[str, dict[str, Any], Callable[[float, int], float]]] = {
    "cosine": ("CosineAnnealingLR", {"eta_min": 0.01}, lambda b, t: 0.01 + (b - 0.01) * _cos(t / 12)),
    "cosine warmup": (
        "CosineAnnealingWarmupLR",
        {"warmup_steps": 4, "eta_min": 0.01},
        _warm(4, lambda b, t: 0.01 + (b - 0.01) * _cos((t - 4) / 8)),
    ),
    "flat": ("FlatAnnealingLR", {}, lambda b, t: b if t < 8 else b * _cos((t - 8) / 4)),  # int(0.72 * 12) = 8
    "flat warmup": (
        "FlatAnnealingWarmupLR",
        {"warmup_steps": 2, "pct_start": 0.5, "eta_min": 0.02},
        _warm(2, lambda b, t: b if t < 7 else 0.02 + (b - 0.02) * _cos((t - 7) / 5)),
    ),
    "linear": ("LinearWarmupLR", {}, lambda b, t: b * (12 - t) / 12),
    "linear warmup": (
        "LinearWarmupLR",
        {"warmup_steps": 3},
        lambda b, t: b * (t + 1) / 4 if t < 3 else b * (12 - t) / 9,
    ),
    "multistep": (
        "MultiStepLR",
        {"milestones": [9, 3], "gamma": 0.5},
        lambda b, t: b * 0.5 ** ((t >= 3) + (t >= 9)),
    ),
    "multistep warmup": (
        "MultiStepWarmupLR",
        {"warmup_steps": 3, "milestones": [3, 7], "gamma": 0.5},
        _warm(3, lambda b, t: b * 0.5 ** (1 + (t >= 7))),
    ),
    "polynomial": (
        "PolynomialLR",
        {"end_lr": 0.001, "power": 2.0},
        lambda b, t: 0.001 + (b - 0.001) * (1 - t / 12) ** 2,
    ),
    "polynomial warmup": (
        "PolynomialWarmupLR",
        {"warmup_steps": 2, "end_lr": 0.001, "power": 2.0},
        _warm(2, lambda b, t: 0.001 + (b - 0.001) * (1 - (t - 2) / 10) ** 2),
    ),
    "step": ("StepLR", {"step_size": 5, "gamma": 0.1}, lambda b, t: b * 0.1 ** (t // 5)),
    "exponential": ("ExponentialLR", {"gamma": 0.9}, lambda b, t: b * 0.9**t),
    "lambda": ("LambdaLR", {"lr_lambda": lambda t: 1 / (t + 1)}, lambda b, t: b / (t + 1)),
    "multiplicative": (
        "MultiplicativeLR",
        {"lr_lambda": lambda t: 0.5 + 0.1 * t},
        lambda b, t: b * _product(t),
    ),
    "one cycle": (
        "OneCycleLR",
        {"pct_start": 0.25, "anneal_strategy": "linear", "div_factor": 10.0, "final_div_factor": 100.0},
        _one_cycle,
    ),
}


def _optimizer(kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in BASE]
    return kind(groups, **options)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _make(case: str, optimizer: torch.optim.Optimizer) -> LRScheduler:
    name, options, _ = CASES[case]
    return getattr(lrs, name)(optimizer, TOTAL, **options)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rates_follow_the_formula_and_are_held_at_the_end(case: str, wrap: bool) -> None:
    optimizer = _optimizer(momentum=0.9)
    if wrap:
        optimizer = OptimizerWrapper(optimizer)
    name, _, formula = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = _make(case, optimizer)
        for step in range(TOTAL + 1):
            expected = [formula(b, step) for b in BASE]
            assert _rates(optimizer) == pytest.approx(expected, rel=1e-12, abs=1e-15)
            assert scheduler.get_last_lr() == _rates(optimizer)
            optimizer.step()
            if step < TOTAL:
                scheduler.step()
    with pytest.warns(UserWarning, match=rf"{name} ended after total_steps=12 and is stepped further"):
        scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once, not every step
        scheduler.step()
    assert _rates(optimizer) == pytest.approx([formula(b, TOTAL) for b in BASE], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_a_scheduler_is_registered_and_one_of_torch(case: str) -> None:
    name = CASES[case][0]
    assert LR_SCHEDULERS.get_module(name) is getattr(lrs, name)
    assert issubclass(getattr(lrs, name), LRScheduler)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_training_has_the_rates_of_an_uninterrupted_one(
    case: str, with_optimizer: bool, tmp_path: Path
) -> None:
    booster = Booster(device="cpu")
    seen: list[list[Any]] = []
    for resume in (False, True):
        optimizer = _optimizer(momentum=0.9)
        scheduler = _make(case, optimizer)
        for step in range(TOTAL):
            if resume and step == 5:
                booster.save_optimizer(optimizer, tmp_path / "optimizer")
                booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
                optimizer = _optimizer(momentum=0.9)
                scheduler = _make(case, optimizer)
                if with_optimizer:
                    booster.load_optimizer(optimizer, tmp_path / "optimizer")
                booster.load_lr_scheduler(scheduler, tmp_path / "scheduler")
            seen.append([_rates(optimizer), [group["momentum"] for group in optimizer.param_groups]])
            optimizer.step()
            scheduler.step()
    assert seen[:TOTAL] == seen[TOTAL:]


def test_one_cycle_cycles_the_momentum_against_the_rate() -> None:
    for kind, read in ((torch.optim.SGD, "momentum"), (torch.optim.Adam, "betas")):
        optimizer = _optimizer(kind, momentum=0.9) if read == "momentum" else _optimizer(kind)
        scheduler = lrs.OneCycleLR(optimizer, total_steps=10, pct_start=0.5)
        seen = []
        for _ in range(10):
            value = optimizer.param_groups[1][read]
            seen.append(value if read == "momentum" else value[0])
            optimizer.step()
            scheduler.step()
        assert seen[0] == pytest.approx(0.95)
        assert min(seen) == seen[4] == pytest.approx(0.85)
        assert seen[9] == pytest.approx(0.95)


def test_one_cycle_is_torchs() -> None:
    ours, theirs = _optimizer(momentum=0.9), _optimizer(momentum=0.9)
    a = lrs.OneCycleLR(ours, total_steps=20)
    b = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=list(BASE), total_steps=20)
    for _ in range(19):
        assert _rates(ours) == pytest.approx(_rates(theirs), rel=1e-9)
        assert ours.param_groups[0]["momentum"] == pytest.approx(theirs.param_groups[0]["momentum"])
        ours.step(), a.step(), theirs.step(), b.step()


AFTER: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "torch": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "ours": lambda o: lrs.StepLR(o, 20, 2, 0.5),
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(("warmup", "delay"), [(0, 3), (3, 0), (2, 3), (0, 0)])
def test_delayed_schedulers_start_the_other_one_when_it_is_its_turn(
    warmup: int, delay: int, after: str
) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        inner = AFTER[after](optimizer)
        if warmup and delay:
            return lrs.WarmupDelayerScheduler(optimizer, warmup, delay, inner)
        if warmup:
            return lrs.WarmupScheduler(optimizer, warmup, inner)
        return lrs.DelayerScheduler(optimizer, delay, inner)

    def rate(base: float, t: int) -> float:
        if t < warmup:
            return base * (t + 1) / warmup
        return base * 0.5 ** (max(0, t - warmup - delay) // 2)

    for interrupted_at in (None, 1, warmup + delay, 7):
        optimizer = _optimizer()
        scheduler = make(optimizer)
        for step in range(12):
            if step == interrupted_at:
                state = scheduler.state_dict()
                optimizer = _optimizer()
                scheduler = make(optimizer)
                scheduler.load_state_dict(state)
            assert _rates(optimizer) == pytest.approx([rate(b, step) for b in BASE], rel=1e-12)
            optimizer.step()
            scheduler.step()


def test_a_tensor_as_learning_rate_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate, foreach=True, capturable=True)
    scheduler = lrs.CosineAnnealingLR(optimizer, 10)
    state = scheduler.state_dict()
    optimizer.step()
    scheduler.step()
    scheduler.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("total_steps", [0, -1, 2.5, None])
@pytest.mark.parametrize("case", CASES)
def test_a_number_of_steps_that_is_none_is_refused(case: str, total_steps: object) -> None:
    name, options, _ = CASES[case]
    with pytest.raises(ValueError, match=rf"{name} needs total_steps.*got"):
        getattr(lrs, name)(_optimizer(momentum=0.9), total_steps, **options)


def test_what_makes_no_sense_is_refused() -> None:
    optimizer = _optimizer()
    with pytest.raises(ValueError, match=r"StepLR needs step_size.*at least 1; got 0"):
        lrs.StepLR(optimizer, 3, step_size=0)
    with pytest.raises(ValueError, match=r"CosineAnnealingWarmupLR needs warmup_steps.*got -1"):
        lrs.CosineAnnealingWarmupLR(optimizer, 3, warmup_steps=-1)
    for kind in (lrs.FlatAnnealingLR, lrs.FlatAnnealingWarmupLR, lrs.OneCycleLR):
        with pytest.raises(ValueError, match=rf"{kind.__name__}.* pct_start.*0 to 1; got 1.5"):
            kind(optimizer, 3, pct_start=1.5)
    with pytest.raises(ValueError, match=r"needs end_lr and power of at least 0; got .*power=-1"):
        lrs.PolynomialLR(optimizer, 3, power=-1)
    for kind in (lrs.MultiStepLR, lrs.MultiStepWarmupLR):
        with pytest.raises(ValueError, match=rf"{kind.__name__} needs milestones"):
            kind(optimizer, 3)
    for kind in (lrs.LambdaLR, lrs.MultiplicativeLR):
        with pytest.raises(ValueError, match=rf"{kind.__name__} needs lr_lambda"):
            kind(optimizer, 3)
    with pytest.raises(ValueError, match="knows the anneal_strategy cos and linear; got 'exp'"):
        lrs.OneCycleLR(optimizer, 3, anneal_strategy="exp")
    with pytest.raises(ValueError, match="Adagrad has none; set cycle_momentum=False"):
        lrs.OneCycleLR(_optimizer(torch.optim.Adagrad), 3)
    with pytest.raises(TypeError, match="needs after_scheduler, a learning-rate scheduler; got int"):
        lrs.WarmupScheduler(optimizer, 3, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be built on the same optimizer"):
        lrs.WarmupScheduler(optimizer, 3, lrs.StepLR(_optimizer(), 3))
    with pytest.raises(ValueError, match=r"takes no epoch; it counts its calls\. Got 3"):
        lrs.WarmupScheduler(optimizer, 3, lrs.StepLR(optimizer, 3)).step(3)


def test_a_state_of_another_optimizer_is_refused() -> None:
    state = lrs.StepLR(_optimizer(), 3).state_dict()
    one_group = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(
        ValueError, match="StepLR is that of an optimizer with 2 parameter groups; this one has 1"
    ):
        lrs.StepLR(one_group, 3).load_state_dict(state)


def test_an_option_without_effect_is_not_passed_over_in_silence() -> None:
    with pytest.warns(UserWarning, match="CosineAnnealingLR does not use warmup_steps"):
        lrs.CosineAnnealingLR(_optimizer(), total_steps=3, warmup_steps=2)
    with pytest.warns(UserWarning, match=r"ignores milestones \[1\]: they are inside the 2 steps of warm-up"):
        lrs.MultiStepWarmupLR(_optimizer(), 9, warmup_steps=2, milestones=[1, 5])
    with pytest.warns(UserWarning, match=r"warms up for 50 of total_steps=2 steps: .* never reaches"):
        lrs.LinearWarmupLR(_optimizer(), warmup_steps=50, total_steps=2)
