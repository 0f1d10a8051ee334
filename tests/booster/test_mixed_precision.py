from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from colossalai import mixed_precision
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    mixed_precision_factory,
)
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from tests.booster.plans import batches, launch, mlp

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# of the loss, against fp32
RELATIVE = {"fp16": 2e-3, "fp16_naive": 2e-3, "fp16_apex": 2e-3, "bf16": 2e-2}


def _boost(precision: Any, lr: float = 0.1) -> tuple[nn.Module, Any, Any, Booster]:
    torch.manual_seed(0)
    model = mlp()
    booster = Booster(device="cpu", mixed_precision=precision)
    raw = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model, optimizer, criterion, _, _ = booster.boost(model, raw, nn.CrossEntropyLoss())
    return model, optimizer, criterion, booster


def test_the_factory_makes_what_is_asked_for() -> None:
    made = {name: type(mixed_precision_factory(name)) for name in RELATIVE}
    assert made == {
        "fp16": FP16TorchMixedPrecision,
        "fp16_naive": FP16NaiveMixedPrecision,
        "fp16_apex": FP16ApexMixedPrecision,
        "bf16": BF16MixedPrecision,
    }
    assert mixed_precision.FP16NaiveMixedPrecision is FP16NaiveMixedPrecision


def test_documented_arguments_reach_the_machinery() -> None:
    naive = FP16NaiveMixedPrecision(False, 2**10, 4, 0.25, 1, 2**12, None)
    model, optimizer, _ = naive.configure(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    assert optimizer.loss_scale == 2**10  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"min_scale <= initial_scale <= max_scale, got 1 <= 65536 <= 2"):
        FP16NaiveMixedPrecision(max_scale=2)
    apex = FP16ApexMixedPrecision("O2", loss_scale=4.0, cast_model_outputs=torch.float16)
    model, optimizer, _ = apex.configure(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    assert optimizer.loss_scale == 4.0  # type: ignore[union-attr]
    assert model(torch.ones(2, 6)).dtype is torch.float16
    with pytest.raises(ValueError, match="opt_level must be one of O0, O1, O2, O3"):
        FP16ApexMixedPrecision("O4")


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "fp16_apex"])
@pytest.mark.parametrize("shard", [False, True])
def test_a_checkpoint_of_the_booster_goes_on_exactly(precision: str, shard: bool, tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: Any, criterion: Any) -> list[float]:
        losses = []
        for x, y in batches((16,) * 3):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer, criterion, booster = _boost(precision)
    optimizer.backward(
        model(torch.ones(2, 6)).sum() * float("inf")
    )  # the scale is not the first one any more
    optimizer.step()
    steps(model, optimizer, criterion)
    booster.save_model(model, tmp_path / "model", shard=shard)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=shard)
    expected = steps(model, optimizer, criterion)
    other, other_optimizer, criterion, booster = _boost(precision)
    booster.load_model(other, tmp_path / "model")
    booster.load_optimizer(other_optimizer, tmp_path / "optimizer")
    assert steps(other, other_optimizer, criterion) == expected
    assert other_optimizer.state_dict()["grad_scaler"] == optimizer.state_dict()["grad_scaler"]
    for p, q in zip(other_optimizer.parameters(), optimizer.parameters(), strict=True):
        assert torch.equal(p, q)


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


def test_an_overflow_skips_the_step_and_the_scheduler_waits() -> None:
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
    assert raw.param_groups[0]["lr"] == pytest.approx(0.05)  # one update, one step of the scheduler


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
    for precision in RELATIVE:
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
        if rank == 1 and precision != "bf16":  # an overflow on one rank is seen by all
            x = x * float("inf")
        before = copy.deepcopy(boosted.state_dict())
        optimizer.zero_grad()
        booster.backward(criterion(boosted(x), y), optimizer)
        optimizer.step()
        skipped = all(torch.equal(v, before[k]) for k, v in boosted.state_dict().items())
        assert skipped == (precision != "bf16")


def _masters_under_ddp(rank: int, world_size: int, port: int) -> None:
    """Ranks that start from different weights; DDP brings those of rank 0 to all, and the masters must
    notice.
    """
    launch(rank, world_size, port)
    for precision in ("fp16_naive", FP16ApexMixedPrecision("O2")):
        torch.manual_seed(rank)
        model = mlp()
        first = copy.deepcopy(model.state_dict())
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(device="cpu", mixed_precision=precision, plugin=TorchDDPPlugin())
        boosted, optimizer, *_ = booster.boost(model, raw)
        x, y = batches((16,))[0]
        booster.backward(F.cross_entropy(boosted(x[rank::2]), y[rank::2]), optimizer)
        optimizer.step()
        for tensor in (*boosted.parameters(), *optimizer.parameters()):
            others = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(others, tensor.detach())
            assert torch.equal(others[0], others[1])
        first_of_rank_0 = [first["0.weight"]]
        dist.broadcast_object_list(first_of_rank_0, src=0)
        assert (boosted.state_dict()["0.weight"].float() - first_of_rank_0[0]).abs().max() < 0.02


def test_masters_follow_the_weights_that_ddp_chose() -> None:
    spawn(_masters_under_ddp, 2)


def test_mixed_precision_under_ddp() -> None:
    spawn(_amp_under_ddp, 2)
