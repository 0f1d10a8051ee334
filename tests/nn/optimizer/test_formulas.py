"""100 steps of every optimizer against independent float64 formulas."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.nn import optimizer as optim
from tests.nn.optimizer import reference

SHAPES = [(5, 7), (7,), (3, 2, 2), ()]
STEPS = 100

ADAM = [
    {"weight_decay": decay, "bias_correction": correction, "adamw_mode": mode}
    for decay in (0.0, 0.1)
    for correction in (True, False)
    for mode in (True, False)
]
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *(
        (name, reference.adam, {"lr": 1e-2, **options})
        for name, some in (("FusedAdam", ADAM), ("CPUAdam", ADAM[-1:]), ("HybridAdam", ADAM[-1:]))
        for options in some
    ),
    ("FusedAdam", reference.adam, {"lr": 1e-2, "betas": (0.5, 0.8), "eps": 1e-3}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2, "weight_decay": 0.1}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (
        "FusedSGD",
        reference.sgd,
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
    ),
    ("Lamb", reference.lamb, {"lr": 1e-2}),
    ("Lamb", reference.lamb, {"lr": 1e-2, "weight_decay": 0.1}),
    ("Lamb", reference.lamb, {"lr": 1e-2, "weight_decay": 0.1, "adam": True}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2, "weight_decay": 0.0}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2, "weight_decay": 0.0, "use_nvlamb": True}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2, "bias_correction": False, "adam_w_mode": False}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2, "grad_averaging": False, "max_grad_norm": 0.0}),
    ("Lars", reference.lars, {"lr": 1.0}),
    ("Lars", reference.lars, {"lr": 1.0, "momentum": 0.9}),
    ("Lars", reference.lars, {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1, "eeta": 0.01, "epsilon": 0.1}),
]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, _, options in CASES]


def _start(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    weights[1].zero_()  # a bias: its norm is 0
    return [torch.nn.Parameter(w.to(device, dtype)) for w in weights]


@cache
def _grads(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def _train(kind: Any, options: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    parameters = _start(dtype, device)
    optimizer = kind(parameters, **options)
    for step in range(1, STEPS + 1):
        for p, g in zip(parameters, _grads(step, dtype), strict=True):
            p.grad = g.to(device)
        optimizer.step()
    masters = [optimizer.master(p) for p in parameters]
    return [w.detach().cpu().double() for w in masters]


def _expected(formula: Any, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    weights = [p.detach().double() for p in _start(dtype)]
    update, state = formula(**options), {}
    for step in range(1, STEPS + 1):
        update(weights, [g.double() for g in _grads(step, dtype)], state, step)
    return weights


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("name", "formula", "options"), CASES, ids=IDS)
def test_a_hundred_steps_follow_the_formula(name: str, formula: Any, options: dict[str, Any]) -> None:
    kind = getattr(optim, name)
    expected = _expected(formula, options)
    assert _distance(_train(kind, options, torch.float64), expected) < 1e-10
    assert _distance(_train(kind, options, torch.float32), expected) < 2e-5
    # half-precision gradients and weights, but float32 masters: nothing is lost beyond the rounding of the
    # input
    expected = _expected(formula, options, torch.bfloat16)
    assert _distance(_train(kind, options, torch.bfloat16), expected) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "formula", "options"), CASES, ids=IDS)
def test_a_hundred_steps_on_the_gpu(name: str, formula: Any, options: dict[str, Any]) -> None:
    if name == "CPUAdam":
        pytest.skip("for the CPU only")
    kind = getattr(optim, name)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        assert _distance(_train(kind, options, dtype, "cuda"), _expected(formula, options)) < tolerance
    for dtype in (torch.bfloat16, torch.float16):
        assert _distance(_train(kind, options, dtype, "cuda"), _expected(formula, options, dtype)) < 2e-5


DROPPED: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("FusedAdam", reference.adam, {"lr": 1e-2}, {"bias_correction": False}),
    ("FusedAdam", reference.adam, {"lr": 1e-2, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    ("FusedAdam", reference.adam, {"lr": 1e-2, "weight_decay": 0.1}, {"adamw_mode": False}),
    ("FusedSGD", reference.sgd, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, {"nesterov": False}),
    ("Lamb", reference.lamb, {"lr": 1e-2}, {"adam": True}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2}, {"bias_correction": False}),
    ("FusedLAMB", reference.fused_lamb, {"lr": 1e-2, "bias_correction": False}, {"max_grad_norm": 0.0}),
    ("Lars", reference.lars, {"lr": 1.0, "momentum": 0.9}, {"momentum": 0.0}),
]


@pytest.mark.parametrize(("name", "formula", "options", "dropped"), DROPPED)
def test_the_comparison_sees_what_is_dropped(
    name: str, formula: Any, options: dict[str, Any], dropped: dict[str, Any]
) -> None:
    found = _train(getattr(optim, name), options, torch.float32)
    assert _distance(found, _expected(formula, options | dropped)) > 1e-3
