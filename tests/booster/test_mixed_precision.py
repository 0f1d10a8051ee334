from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16TorchMixedPrecision,
    mixed_precision_factory,
)
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from tests.booster.plans import batches, launch, mlp

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
RELATIVE = {"fp16": 2e-3, "bf16": 2e-2}  # of the loss, against fp32


def _boost(precision: Any, lr: float = 0.1) -> tuple[nn.Module, Any, Any, Booster]:
    torch.manual_seed(0)
    model = mlp()
    booster = Booster(device="cpu", mixed_precision=precision)
    raw = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model, optimizer, criterion, _, _ = booster.boost(model, raw, nn.CrossEntropyLoss())
    return model, optimizer, criterion, booster


def test_the_factory_makes_what_is_asked_for() -> None:
    assert isinstance(mixed_precision_factory("fp16"), FP16TorchMixedPrecision)
    assert isinstance(mixed_precision_factory("bf16"), BF16MixedPrecision)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_training_follows_fp32(precision: str) -> None:
    model, optimizer, criterion, booster = _boost(precision)
    torch.manual_seed(0)
    reference = mlp()
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches((16,) * 10):
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype is DTYPES[precision]
        loss = criterion(output, y)
        assert loss.dtype is torch.float32
        booster.backward(loss, optimizer)
        optimizer.step()
        reference_optimizer.zero_grad()
        expected = F.cross_entropy(reference(x), y)
        expected.backward()
        reference_optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=RELATIVE[precision])
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_criterion_may_be_a_function() -> None:
    booster = Booster(device="cpu", mixed_precision="fp16")
    *_, criterion, _, _ = booster.boost(mlp(), None, lambda x: (x @ x.T).mean())
    assert criterion is not None
    assert criterion(torch.ones(2, 2)).dtype is torch.float16


def test_a_model_without_parameters_can_be_boosted() -> None:
    model, *_ = Booster(device="cpu", mixed_precision="bf16").boost(nn.Tanh())
    assert model(torch.zeros(2)).sum() == 0


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_unscaled_once_before_clipping(twice: bool) -> None:
    x, y = batches((16,))[0]
    model, optimizer, criterion, booster = _boost("fp16")
    booster.backward(criterion(model(x), y), optimizer)
    scaled = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    scale = optimizer.scaler.get_scale()
    assert scale == 2**16
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in scaled])) / scale
    norm = optimizer.clip_grad_by_norm(1e6)
    torch.testing.assert_close(norm, expected)
    if twice:
        torch.testing.assert_close(optimizer.clip_grad_by_norm(1e6), expected)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for p, q, g in zip(model.parameters(), before, scaled, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.1 * g / scale)


def test_clipping_by_value_sees_unscaled_gradients() -> None:
    x, y = batches((16,))[0]
    model, optimizer, criterion, booster = _boost("fp16")
    booster.backward(criterion(model(x), y), optimizer)
    expected = [(p.grad / 2**16).clamp(-0.01, 0.01) for p in model.parameters()]  # type: ignore[operator]
    optimizer.clip_grad_by_value(0.01)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_an_overflow_skips_the_step_and_the_scheduler_goes_on() -> None:
    torch.manual_seed(0)
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(raw, step_size=1, gamma=0.5)
    precision = FP16TorchMixedPrecision(init_scale=2.0**40, backoff_factor=2.0**-30)
    booster = Booster(device="cpu", mixed_precision=precision)
    boosted, optimizer, criterion, _, scheduler = booster.boost(  # type: ignore[assignment]
        model, raw, nn.CrossEntropyLoss(), None, scheduler
    )
    before = copy.deepcopy(boosted.state_dict())
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for x, y in batches((16, 16)):
            optimizer.zero_grad()
            booster.backward(criterion(boosted(x), y), optimizer)  # type: ignore[misc]
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            scheduler.step()
            moved.append(any(not torch.equal(v, before[k]) for k, v in boosted.state_dict().items()))
    assert moved == [False, True]
    assert optimizer.scaler.get_scale() == 2.0**10
    assert raw.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_backward_pass_after_clipping_is_refused_until_the_gradients_are_used_or_dropped() -> None:
    x, y = batches((16,))[0]
    model, optimizer, criterion, booster = _boost("fp16")
    booster.backward(criterion(model(x), y), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match=r"gradients were unscaled already \(by clipping\)"):
        booster.backward(criterion(model(x), y), optimizer)
    optimizer.zero_grad()
    for _ in range(2):
        booster.backward(criterion(model(x), y), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()


def test_a_step_without_gradients_does_nothing() -> None:
    model, optimizer, _, _ = _boost("fp16")
    before = copy.deepcopy(model.state_dict())
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_closures_and_senseless_options_are_refused() -> None:
    _, optimizer, _, _ = _boost("fp16")
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match=r"growth_factor > 1.*got 65536.0, 0.5, 0.5, 2000"):
        FP16TorchMixedPrecision(growth_factor=0.5)


def _amp_under_ddp(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for precision in ("fp16", "bf16"):
        torch.manual_seed(0)
        model = mlp()
        serial = copy.deepcopy(model)
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(device="cpu", mixed_precision=precision, plugin=TorchDDPPlugin())
        boosted, optimizer, criterion, *_ = booster.boost(model, raw, nn.CrossEntropyLoss())
        assert list(boosted.state_dict()) == list(serial.state_dict())
        assert criterion is not None
        serial_booster = Booster(device="cpu", mixed_precision=precision)
        serial_raw = torch.optim.SGD(serial.parameters(), lr=0.1)
        serial_boosted, serial_optimizer, *_ = serial_booster.boost(serial, serial_raw)
        for x, y in batches((16, 16)):
            for b, m, o, part in (
                (booster, boosted, optimizer, slice(rank, None, world_size)),
                (serial_booster, serial_boosted, serial_optimizer, slice(None)),
            ):
                o.zero_grad()
                b.backward(criterion(m(x[part]), y[part]), o)
                o.clip_grad_by_norm(0.1)
                o.step()
        for p, q in zip(boosted.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=RELATIVE[precision], atol=1e-3)
        if rank == 1 and precision == "fp16":  # an overflow on one rank is seen by all
            x = x * float("inf")
        before = copy.deepcopy(boosted.state_dict())
        optimizer.zero_grad()
        booster.backward(criterion(boosted(x), y), optimizer)
        optimizer.step()
        skipped = all(torch.equal(v, before[k]) for k, v in boosted.state_dict().items())
        assert skipped == (precision == "fp16")


def test_mixed_precision_under_ddp() -> None:
    spawn(_amp_under_ddp, 2)
