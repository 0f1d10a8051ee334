from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai.amp
from colossalai.amp import AMP_TYPE, convert_to_amp
from colossalai.amp.torch_amp import GradScaler, TorchAMPLoss, TorchAMPModel, TorchAMPOptimizer
from colossalai.context import Config
from tests.amp.page_38 import DOCUMENTED
from tests.amp.tools import batch, mlp


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_every_mode_trains(mode: AMP_TYPE) -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_model, optimizer, criterion = colossalai.amp.convert_to_amp(model, raw, nn.CrossEntropyLoss(), mode)
    x, y = batch()
    loss = criterion(amp_model(x), y)  # type: ignore[misc]
    assert loss.dtype is torch.float32
    optimizer.backward(loss)  # type: ignore[union-attr]
    optimizer.step()  # type: ignore[union-attr]
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert next(model.parameters()).dtype is (torch.float16 if mode is AMP_TYPE.NAIVE else torch.float32)


@pytest.mark.parametrize("mode", AMP_TYPE)
@pytest.mark.parametrize("max_norm", [0.05, 100.0, 0])
def test_every_mode_clips(mode: AMP_TYPE, max_norm: float) -> None:
    model, plain = mlp(), mlp()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    amp_model, optimizer, _ = convert_to_amp(model, optimizers[0], None, mode)
    x, y = batch()
    optimizer.backward(nn.functional.cross_entropy(amp_model(x).float(), y))  # type: ignore[union-attr]
    nn.functional.cross_entropy(plain(x), y).backward()
    norm = optimizer.clip_grad_norm(amp_model, max_norm)  # type: ignore[union-attr]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(norm, expected, rtol=0.01, atol=0)
    optimizer.step()  # type: ignore[union-attr]
    optimizers[1].step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_a_model_may_come_alone(mode: AMP_TYPE) -> None:
    amp_model, optimizer, criterion = convert_to_amp(mlp(), None, None, mode)
    assert (optimizer, criterion) == (None, None)
    assert amp_model(batch()[0]).isfinite().all()


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_the_documented_sections_are_understood(mode: AMP_TYPE) -> None:
    model = mlp()
    section = Config({"mode": mode, **DOCUMENTED[mode]})
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, _ = convert_to_amp(model, raw, None, mode, section)
    assert optimizer.loss_scale == (2**32 if mode is AMP_TYPE.NAIVE else 2**16)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_a_mode_may_be_given_by_its_value(mode: AMP_TYPE) -> None:
    """As in a config."""
    model = mlp()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, _ = convert_to_amp(model, raw, None, mode.value, {"mode": mode.value})
    by_name = convert_to_amp(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), None, mode)[1]
    assert type(optimizer) is type(by_name) is not torch.optim.SGD


def test_bad_input_is_refused() -> None:
    raw = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not know the mode 'bf16'; it knows AMP_TYPE\.APEX"):
        convert_to_amp(mlp(), raw, None, "bf16")
    with pytest.raises(
        ValueError, match=r"AMP_TYPE.NAIVE has no option 'init_scale'; it knows .*initial_scale"
    ):
        convert_to_amp(mlp(), raw, None, AMP_TYPE.NAIVE, {"init_scale": 2})
    with pytest.raises(
        ValueError, match=r"amp_config has mode=AMP_TYPE.APEX, but AMP_TYPE.TORCH is asked for"
    ):
        convert_to_amp(mlp(), raw, None, AMP_TYPE.TORCH, {"mode": AMP_TYPE.APEX})
    with pytest.raises(TypeError, match="takes a scaler or options to make one, got both: init_scale"):
        TorchAMPOptimizer(raw, GradScaler(device="cpu"), init_scale=2.0)


def test_the_pieces_of_torch_amp_work_alone() -> None:
    x, y = batch()
    model = TorchAMPModel(mlp())
    optimizer = TorchAMPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), init_scale=4.0)
    for criterion in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        loss = TorchAMPLoss(criterion, "cpu")(model(x), y)
        assert loss.dtype is torch.float32
        optimizer.backward(loss)
    assert optimizer.loss_scale == 4.0
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_disabled_scaler_lets_everything_through() -> None:
    model = TorchAMPModel(mlp())
    optimizer = TorchAMPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
    optimizer.backward(model(batch()[0]).sum() * float("nan"))
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert next(model.parameters()).isnan().any()


def test_the_scale_of_torch_amp_is_saved_and_goes_to_other_precisions() -> None:
    states = []
    for mode in AMP_TYPE:
        model = mlp()
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        amp_model, optimizer, _ = convert_to_amp(model, raw, None, mode)
        optimizer.backward(amp_model(batch()[0]).sum() * float("inf"))  # type: ignore[union-attr]
        optimizer.step()  # type: ignore[union-attr]
        for state in states:
            optimizer.load_state_dict(state)  # type: ignore[union-attr]
            assert optimizer.loss_scale == state["grad_scaler"]["scale"]  # type: ignore[union-attr]
        states.append(optimizer.state_dict())  # type: ignore[union-attr]
    assert len(states) == 3
