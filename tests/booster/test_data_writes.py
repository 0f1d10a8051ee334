"""Weights that a script writes to, also by ``p.data``, which torch does not count, while an optimizer keeps
more of their digits elsewhere.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import FusedSGD, HybridAdam
from colossalai.nn.optimizer.refresh_masters import UncountedWrites
from colossalai.testing import spawn

LIMIT = 0.1
PLANS: dict[str, Any] = {
    "zero bf16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="bf16")),
    "zero fp16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=64)),
    "zero on the host": lambda: Booster(plugin=LowLevelZeroPlugin(precision="fp32", cpu_offload=True)),
    "naive": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16_naive"),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "HybridAdam": lambda params: HybridAdam(params, lr=0.02, eps=1e-3),
}


def _train(plan: str, optimizer: str, by_data: bool, first: int = 0, steps: int = 5) -> dict[str, Any]:
    """Weights after ``steps``, in which they are clamped after each from ``first`` on."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
    booster = PLANS[plan]()
    model, opt, *_ = booster.boost(model, OPTIMIZERS[optimizer](model.parameters()))
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        booster.backward(model(x).float().square().mean(), opt)
        opt.step()
        opt.zero_grad()
        for p in model.parameters() if step >= first else ():
            if by_data:
                p.data.clamp_(-LIMIT, LIMIT)
            else:
                with torch.no_grad():
                    p.clamp_(-LIMIT, LIMIT)
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_plans(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    for plan in PLANS:
        for optimizer in OPTIMIZERS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what torch counts is no reason for a word
                expected = _train(plan, optimizer, by_data=False)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = _train(plan, optimizer, by_data=True)
            told = [w for w in told if "written to by p.data" in str(w.message)]
            tails = plan == "zero bf16" and optimizer == "HybridAdam"  # which need no comparison
            assert len(told) == (0 if tails else 1), f"{plan}, {optimizer}: {[str(w.message) for w in told]}"
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[name],
                    value,
                    rtol=0,
                    atol=2e-3 if tails else 0,
                    msg=f"{plan}, {optimizer}: {name} is {found[name]}, not {value}",
                )


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_clamped_by_data_after_every_step(world_size: int) -> None:
    spawn(check_plans, world_size)


def check_late(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    with pytest.warns(UserWarning, match=r"written to by p\.data .* Writes in the 4 steps before may have"):
        _train("zero bf16", "SGD", by_data=True, first=4, steps=8)


def test_writes_that_begin_late_are_told_of() -> None:
    spawn(check_late, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_optimizer_of_ours_alone(dtype: torch.dtype) -> None:
    weights = []
    for by_data in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
        optimizer = HybridAdam([p], lr=0.1)
        for _ in range(4):
            p.grad = torch.ones_like(p)
            optimizer.step()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (p.data if by_data else p).clamp_(-0.5, 0.5)
        weights.append(p.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0 if dtype == torch.float16 else 4e-3)


def test_weights_that_are_nan_are_not_taken_for_written() -> None:
    p = nn.Parameter(torch.full((3,), float("nan"), dtype=torch.float16))
    optimizer = HybridAdam([p])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            p.grad = torch.ones_like(p)
            optimizer.step()


def test_comparisons_become_rare_until_there_is_a_reason() -> None:
    watch = UncountedWrites()
    assert [step for step in range(1, 20) if watch.is_due()] == [1, 2, 4, 8, 16]
    with pytest.warns(UserWarning, match="written to by p.data"):
        watch.refresh_(torch.ones(2), torch.zeros(2), has_changed=False, compares=True)
    assert watch.is_due()
    assert watch.is_due()


def check_digits(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3))
    booster = Booster(plugin=LowLevelZeroPlugin(precision="bf16", cpu_offload=True))
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=0.02))
    inner: Any = optimizer
    for _ in range(2):
        booster.backward(model(torch.ones(4, 8)).float().square().mean(), inner)
        inner.step()
        inner.zero_grad()
    before = [inner.optim.master(piece.value).clone() for piece in inner.pieces]
    with torch.no_grad():
        inner.pieces[0].param.mul_(0.5)
    inner.refresh_masters()
    for piece, digits in zip(inner.pieces, before, strict=True):
        if piece.is_empty:
            continue
        inner.optim.refresh_master(piece.value, inner.optim.state[piece.value])  # as the next step begins
        now = inner.optim.master(piece.value)
        assert piece is inner.pieces[0] or torch.equal(now, digits)
        assert torch.equal(now.bfloat16(), piece.weight)


def test_a_write_to_one_weight_on_the_host_leaves_the_digits_of_the_others() -> None:
    spawn(check_digits, 2)


def zero(precision: str, **options: Any) -> Any:
    return lambda: {"plugin": LowLevelZeroPlugin(precision=precision, initial_scale=64, **options)}


def gemini(precision: str) -> Any:
    return lambda: {
        "plugin": GeminiPlugin(
            device="cpu",
            placement_policy="cuda",
            precision=precision,
            initial_scale=64,
            min_chunk_size_mb=0.0001,
        )
    }


SAVED: dict[str, tuple[Any, torch.dtype]] = {
    "fp16": (lambda: {"device": "cpu"}, torch.float16),
    "bf16": (lambda: {"device": "cpu"}, torch.bfloat16),
    "naive": (lambda: {"device": "cpu", "mixed_precision": "fp16_naive"}, torch.float32),
    "zero fp16": (zero("fp16"), torch.float32),
    "zero bf16": (zero("bf16"), torch.float32),
    "zero fp16 on the host": (zero("fp16", cpu_offload=True), torch.float32),
    "zero bf16 on the host": (zero("bf16", cpu_offload=True), torch.float32),
    "gemini fp16": (gemini("fp16"), torch.float32),
    "gemini bf16": (gemini("bf16"), torch.float32),
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3)).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(next(self.parameters()).dtype)).float()


def check_saved(rank: int, world_size: int, port: int, folder: str) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    on_disk: Any = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": folder}
    makers: dict[str, Any] = {
        "HybridAdam": lambda params: HybridAdam(params, lr=0.02),
        "HybridAdam on a disk": lambda params: HybridAdam(params, lr=0.02, **on_disk),
        "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    }
    cases = itertools.product(SAVED.items(), makers.items(), (False, True))
    for number, ((plan, (options, dtype)), (name, make), by_data) in enumerate(cases):
        if (plan.startswith("gemini") and world_size > 1) or (name == "AdamW" and dtype != torch.float32):
            continue  # whose weights are not there, or which has no masters
        booster = Booster(**options())
        model: Any = Cast(dtype)
        model, optimizer, *_ = booster.boost(model, make(model.parameters()))
        for _ in range(2):
            booster.backward(model(torch.ones(4, 8)).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p in model.parameters():
                (p.data if by_data else p).mul_(0.5)
            wanted = {key: value.clone().float() for key, value in model.state_dict().items()}
            booster.save(f"{folder}/{number}")
        serial: Any = Cast(torch.float32)
        plain = Booster(device="cpu")
        serial, *_ = plain.boost(serial, makers[name.removesuffix(" on a disk")](serial.parameters()))
        plain.load(f"{folder}/{number}")
        for key, value in serial.state_dict().items():
            assert rank or torch.allclose(value, wanted[key], rtol=8e-3), f"{plan}, {name}, {by_data}: {key}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_written_to_before_a_save_are_saved(world_size: int, tmp_path: Path) -> None:
    spawn(check_saved, world_size, folder=str(tmp_path))
