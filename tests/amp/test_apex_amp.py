from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossalai
from colossalai.amp import AMP_TYPE, convert_to_amp, convert_to_apex_amp
from colossalai.amp.apex_amp import ApexOptions
from colossalai.amp.naive_amp import FP16Optimizer
from colossalai.interface import ColossalaiOptimizer
from colossalai.testing import spawn
from tests.amp.tools import batch, logged, mlp, train

HALF, SINGLE = torch.float16, torch.float32


def _converted(**config: Any) -> tuple[nn.Module, FP16Optimizer, nn.Module]:
    model = mlp(norm=True)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_model, optimizer = convert_to_apex_amp(model, raw, config)
    assert isinstance(optimizer, FP16Optimizer)
    return amp_model, optimizer, model


@pytest.mark.parametrize(
    ("level", "linear", "norm", "products", "output", "masters", "scale"),
    [
        ("O0", SINGLE, SINGLE, SINGLE, SINGLE, 0, 1.0),
        ("O1", SINGLE, SINGLE, HALF, HALF, 0, 2**16),
        ("O2", HALF, SINGLE, HALF, SINGLE, 4, 2**16),
        ("O3", HALF, HALF, HALF, SINGLE, 0, 1.0),
    ],
)
def test_what_the_levels_mean(
    level: str,
    linear: torch.dtype,
    norm: torch.dtype,
    products: torch.dtype,
    output: torch.dtype,
    masters: int,
    scale: float,
) -> None:
    amp_model, optimizer, model = _converted(opt_level=level)
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype) == (linear, norm, norm)
    assert amp_model(batch()[0]).dtype is output
    assert seen == [products]
    assert len(optimizer.masters.weights() if optimizer.masters else []) == masters
    assert optimizer.loss_scale == scale
    before = model[0].weight.detach().clone()
    train(amp_model, optimizer, range(3))
    assert not optimizer.step_was_skipped
    assert not torch.equal(model[0].weight, before)
    assert (model[0].weight.dtype, model[1].running_var.dtype) == (linear, norm)
    assert list(amp_model.state_dict()) == list(mlp(norm=True).state_dict())


def test_options_override_the_level() -> None:
    amp_model, optimizer, model = _converted(
        opt_level="O2", keep_batchnorm_fp32=False, master_weights=False, loss_scale=8, cast_model_outputs=HALF
    )
    assert model[1].weight.dtype is HALF
    assert optimizer.masters is None
    assert optimizer.loss_scale == 8
    assert amp_model(batch()[0]).dtype is HALF
    train(amp_model, optimizer, range(2))
    assert optimizer.loss_scale == 8
    amp_model, optimizer, _ = _converted(opt_level="O1", cast_model_outputs=SINGLE, max_loss_scale=2.0**10)
    assert amp_model(batch()[0]).dtype is SINGLE
    assert optimizer.loss_scale == 2**10
    _, optimizer, _ = _converted(opt_level="O1", min_loss_scale=2.0**20)
    assert optimizer.loss_scale == 2**20
    _, optimizer, model = _converted(opt_level="O3", keep_batchnorm_fp32=True, master_weights=True)
    assert (model[1].weight.dtype, model[0].weight.dtype) == (SINGLE, HALF)
    assert optimizer.masters is not None
    amp_model, _, model = _converted(opt_level="O1", patch_torch_functions=False)
    assert amp_model(batch()[0]).dtype is SINGLE


def test_disabled_changes_nothing() -> None:
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    converted = convert_to_amp(model, raw, criterion, AMP_TYPE.APEX, {"enabled": False})
    assert (converted[0], converted[2]) == (model, criterion)
    optimizer = converted[1]
    assert isinstance(optimizer, ColossalaiOptimizer)  # a script calls optimizer.backward all the same
    train(model, optimizer, range(1))
    twin = mlp()
    optimizer = ColossalaiOptimizer(torch.optim.SGD(twin.parameters(), lr=0.1))
    train(twin, optimizer, range(1))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def _passes(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        x, y = batch(step)
        optimizer.backward(nn.functional.cross_entropy(model(x).float(), y))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_unscaled_after_a_backward_pass(level: str, passes: int) -> None:
    """Also after several that are summed; weights with a master keep the scaled ones, as with Apex."""
    amp_model, optimizer, model = _converted(opt_level=level, loss_scale=2.0**7)
    plain = mlp(norm=True)
    _passes(amp_model, optimizer, passes)
    for step in range(passes):
        x, y = batch(step)
        nn.functional.cross_entropy(plain(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        factor = 2.0**7 if level == "O2" and p.dtype is HALF else 1.0
        torch.testing.assert_close(
            p.grad.float() / factor, q.grad, rtol=0.02, atol=0.002, msg=lambda text, name=name: name + text
        )
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # divides what is left, and only that
    for p, old, q in zip(model.parameters(), before, plain.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.float(), old.float() - 0.1 * q.grad, rtol=0.01, atol=0.001)
    assert not optimizer.step_was_skipped


def test_gradients_of_a_step_that_nothing_cleared_are_added_to() -> None:
    """As in plain PyTorch, though the loss scale has changed in between."""
    amp_model, optimizer, model = _converted(opt_level="O1")
    _passes(amp_model, optimizer, 1)
    optimizer.step()
    first = model[3].weight.grad.clone()
    optimizer.scaler.update(True)  # halved
    _passes(amp_model, optimizer, 1)
    second = model[3].weight.grad - first
    optimizer.zero_grad()
    _passes(amp_model, optimizer, 1)
    torch.testing.assert_close(model[3].weight.grad, second, rtol=1e-3, atol=1e-5)


def test_overflow_skips_the_step_whenever_it_is_found() -> None:
    amp_model, optimizer, model = _converted(opt_level="O1")
    before = model[0].weight.detach().clone()
    optimizer.backward(amp_model(batch()[0]).float().sum() * float("inf"))
    _passes(amp_model, optimizer, 1)
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    _passes(amp_model, optimizer, 1)
    model[0].weight.grad[0] = float("nan")  # as averaging over ranks may bring it
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model[0].weight, before)


def test_a_replaced_forward_is_kept() -> None:
    """By a wrapper: a class cannot stand around a function of one instance."""
    model = mlp()
    model.forward = lambda x: nn.functional.linear(x, model[0].weight)  # type: ignore[method-assign]
    amp_model, _ = convert_to_apex_amp(model, None)
    assert amp_model is not model
    assert amp_model(batch()[0]).dtype is HALF
    assert amp_model(batch()[0]).shape == (8, 16)


def test_a_model_is_converted_to_one_level() -> None:
    """Also for a second optimizer, and in copies."""
    amp_model, _, model = _converted(opt_level="O1")
    again, optimizer = convert_to_apex_amp(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert again is amp_model
    _passes(again, optimizer, 1)
    optimizer.step()
    assert copy.deepcopy(again)(batch()[0]).dtype is HALF
    assert pickle.loads(pickle.dumps(again))(batch()[0]).dtype is HALF
    with pytest.raises(ValueError, match=r"Sequential computes in a level of Apex already .* once"):
        convert_to_apex_amp(model, None, {"opt_level": "O2"})
    assert model[0].weight.dtype is SINGLE


def _under_ddp(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    names = list(mlp(norm=True).state_dict())
    for level in ("O1", "O2"):
        model = mlp(norm=True)
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        amp_model, optimizer = convert_to_apex_amp(model, raw, {"opt_level": level, "loss_scale": 2.0**7})
        assert amp_model is model
        ddp = DistributedDataParallel(amp_model)
        assert list(ddp.state_dict()) == [f"module.{name}" for name in names]
        assert [n for n, _ in ddp.named_parameters()] == [f"module.{n}" for n, _ in model.named_parameters()]
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_model, optimizer = convert_to_apex_amp(model, raw, {"opt_level": "O1"})
    ddp = DistributedDataParallel(amp_model)
    parts = [batch(step, 4) for step in range(2 * world_size)]
    for step in range(2):  # the first without messages; all ranks together see every part
        x, y = parts[step * world_size + rank]
        with ddp.no_sync() if step == 0 else nullcontext():
            optimizer.backward(nn.functional.cross_entropy(ddp(x).float(), y))
    plain = mlp()
    for x, y in parts:
        (nn.functional.cross_entropy(plain(x), y) / world_size).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.002)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = optimizer.clip_grad_norm(ddp, 0.1)
    torch.testing.assert_close(norm, expected, rtol=0.01, atol=0)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.01, atol=1e-4)


def test_under_ddp_names_are_those_of_the_model_and_gradients_are_averaged() -> None:
    spawn(_under_ddp, 2)


def test_verbosity() -> None:
    for verbosity, told in ((0, 0), (1, 1), (2, 2)):
        amp_model, optimizer, _ = _converted(opt_level="O2", verbosity=verbosity)
        with logged() as lines:
            optimizer.backward(amp_model(batch()[0]).sum() * float("inf"))
            optimizer.step()
        assert len([line for line in lines if "loss scale" in line]) == told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"opt_level": "02"},
            r"opt_level must be one of O0, O1, O2, O3 \(the letter O and a digit\), got '02'",
        ),
        ({"cast_model_type": HALF}, "patch_torch_functions=True leaves the weights in fp32"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True leaves the weights"),
        ({"keep_batchnorm_fp32": True}, "are for models that are cast to torch.float16"),
        ({"opt_level": "O0", "master_weights": True}, "are for models that are cast to torch.float16"),
        ({"opt_level": "O2", "cast_model_type": SINGLE}, "are for models that are cast to torch.float16"),
        ({"cast_model_type": torch.bfloat16}, "cast_model_type must be torch.float16 or torch.float32"),
        ({"loss_scale": "static"}, "loss_scale must be a number above 0 or 'dynamic'"),
        ({"loss_scale": 0}, "loss_scale must be a number above 0 or 'dynamic'"),
        ({"num_losses": 2}, "num_losses=2: one loss scale serves all losses here"),
        ({"min_loss_scale": 4, "max_loss_scale": 2}, "min_loss_scale=4 is above max_loss_scale=2"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ApexOptions(**options)
