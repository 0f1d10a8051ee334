from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.amp import AMP_TYPE, convert_to_amp, convert_to_apex_amp
from colossalai.amp.apex_amp import ApexOptions
from colossalai.amp.naive_amp import FP16Optimizer
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
    assert convert_to_amp(model, raw, criterion, AMP_TYPE.APEX, {"enabled": False}) == (model, raw, criterion)


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
