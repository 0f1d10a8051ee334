from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from colossalai.amp import convert_to_naive_amp
from colossalai.amp.naive_amp import (
    ConstantGradScaler,
    DynamicGradScaler,
    FP16Optimizer,
    NaiveAMPModel,
    NaiveAMPOptimizer,
)
from tests.amp.tools import batch, logged, mlp, train


def _converted(optimizer: Any = torch.optim.Adam, **config: Any) -> tuple[nn.Module, NaiveAMPOptimizer]:
    model = mlp()
    amp_model, amp_optimizer = convert_to_naive_amp(model, optimizer(model.parameters(), lr=0.01), config)
    assert isinstance(amp_optimizer, NaiveAMPOptimizer)
    return amp_model, amp_optimizer


def test_weights_and_operations_are_fp16_and_outputs_fp32() -> None:
    model = mlp(norm=True)
    names = list(model.state_dict())
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    amp_model = NaiveAMPModel(model)
    assert amp_model(batch()[0]).dtype is torch.float32
    assert seen == [(torch.float16, torch.float16)]
    assert {p.dtype for p in amp_model.parameters()} == {torch.float16}
    assert list(amp_model.state_dict()) == names
    assert NaiveAMPModel(mlp(), output_to_fp32=False)(batch()[0]).dtype is torch.float16


def test_inputs_are_cast_wherever_they_are_and_integers_are_not() -> None:
    class Net(nn.Module):
        def forward(self, inputs: dict[str, Any], *, scale: Tensor) -> tuple[Tensor, Tensor]:
            assert inputs["x"][0].dtype is scale.dtype is torch.float16
            assert inputs["index"].dtype is torch.int64
            return inputs["x"][0] * scale, inputs["index"]

    out, index = NaiveAMPModel(Net())(
        {"x": [torch.ones(2)], "index": torch.ones(2, dtype=torch.int64)}, scale=torch.ones(1)
    )
    assert (out.dtype, index.dtype) == (torch.float32, torch.int64)


def test_masters_have_the_digits_that_the_weights_had_and_the_steps_of_fp32() -> None:
    model = mlp()
    exact = [p.detach().clone() for p in model.parameters()]
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_model, optimizer = convert_to_naive_amp(model, raw)
    for master, value, weight in zip(optimizer.parameters(), exact, model.parameters(), strict=True):  # type: ignore[union-attr]
        assert master.dtype is torch.float32
        assert torch.equal(master, value)
        assert torch.equal(weight, value.half())
    x, y = batch()
    optimizer.backward(F.cross_entropy(amp_model(x), y))  # type: ignore[union-attr]
    grads = [p.grad.float() / 2**16 for p in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()  # type: ignore[union-attr]
    for master, value, grad, weight in zip(  # type: ignore[misc]
        optimizer.parameters(),
        exact,
        grads,
        model.parameters(),
        strict=True,  # type: ignore[union-attr]
    ):
        torch.testing.assert_close(master.detach(), value - 0.1 * grad, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight, master.half())


def test_updates_that_fp16_would_round_away_add_up() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = FP16Optimizer(torch.optim.SGD([weight], lr=1e-4), ConstantGradScaler(1.0))
    pure = nn.Parameter(torch.ones(1, dtype=torch.float16))
    without = FP16Optimizer(torch.optim.SGD([pure], lr=1e-4), ConstantGradScaler(1.0), master_weights=False)
    for _ in range(100):
        optimizer.backward(weight.sum())
        optimizer.step()
        without.backward(pure.sum())
        without.step()
        without.zero_grad()
    assert weight.item() == pytest.approx(0.99, abs=1e-3)
    assert pure.item() == 1.0


def test_groups_frozen_parameters_and_ties_keep_their_places() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["c"].weight = model["a"].weight
    model["b"].weight.requires_grad_(False)
    raw = torch.optim.SGD(
        [
            {"params": [model["a"].weight, model["b"].weight], "lr": 0.1},
            {"params": [model["a"].bias, model["b"].bias], "lr": 0.0},
        ]
    )
    groups = raw.param_groups
    frozen, moving, still = (
        model[m].get_parameter(n) for m, n in (("b", "weight"), ("a", "weight"), ("a", "bias"))
    )
    _, optimizer = convert_to_naive_amp(model, raw)
    assert optimizer is not None
    assert raw.param_groups is groups
    assert [len(g["params"]) for g in groups] == [2, 2]
    assert groups[0]["params"][1] is frozen
    assert groups[0]["params"][0].dtype is torch.float32
    assert model["c"].weight is model["a"].weight is moving
    before = [p.detach().clone() for p in (frozen, moving, still)]
    for _ in range(2):
        x = torch.ones(2, 4).half()
        optimizer.backward((model["a"](x) + model["b"](x) + model["c"](x)).float().sum() / 8)
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(p, q) for p, q in zip((frozen, moving, still), before, strict=True)]
    assert moved == [False, True, False]
    frozen.requires_grad_(True)  # set free: it gets its master with its first gradient
    optimizer.backward((model["b"](torch.ones(2, 4).half())).float().sum() / 8)
    optimizer.step()
    assert not torch.equal(frozen, before[0])
    assert groups[0]["params"][1].dtype is torch.float32


def test_a_group_may_be_added_and_a_parameter_not_twice() -> None:
    model, optimizer = _converted(torch.optim.SGD)
    new = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer.add_param_group({"params": new, "lr": 4.0})
    optimizer.backward(new.float().sum() / 4)  # 2**16 itself is more than fp16 holds
    optimizer.step()
    assert torch.equal(new, torch.zeros(2).half())
    with pytest.raises(ValueError, match="are in another group of this optimizer already"):
        optimizer.add_param_group({"params": [next(model.parameters())]})


def test_training_goes_on_exactly_from_a_saved_state() -> None:
    model, optimizer = _converted(initial_scale=2**8, growth_interval=3)
    train(model, optimizer, range(4))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(4, 8))
    for model_first in (True, False):
        other, other_optimizer = _converted(initial_scale=2**8, growth_interval=3)
        if model_first:
            other.load_state_dict(state[0])
        other_optimizer.load_state_dict(copy.deepcopy(state[1]))  # torch keeps the tensors it loads
        other.load_state_dict(state[0])
        assert train(other, other_optimizer, range(4, 8)) == expected
        assert other_optimizer.loss_scale == optimizer.loss_scale == 2**10
        for p, q in zip(other_optimizer.parameters(), optimizer.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_state_moves_between_fp32_and_naive_amp() -> None:
    reference = mlp()
    raw = torch.optim.Adam(reference.parameters(), lr=0.01)
    F.cross_entropy(reference(batch()[0]), batch()[1]).backward()
    raw.step()
    model, optimizer = _converted()
    model.load_state_dict(reference.state_dict())
    with pytest.warns(UserWarning, match="holds no loss scale"):
        optimizer.load_state_dict(raw.state_dict())
    assert optimizer.state[optimizer.parameters()[0]]["exp_avg"].dtype is torch.float32
    train(model, optimizer, range(3))
    assert optimizer.state[optimizer.parameters()[0]]["step"] == 4
    raw.load_state_dict(optimizer.state_dict())
    assert raw.state[next(reference.parameters())]["step"] == 4


def test_a_state_of_another_model_is_refused() -> None:
    _, optimizer = _converted()
    state = optimizer.state_dict()
    state["master_weights"] = {0: torch.zeros(1)}
    with pytest.raises(
        ValueError, match=r"master weight 0 has shape \(1,\), but the optimizer has one of shape \(16, 6\)"
    ):
        optimizer.load_state_dict(state)
    state["master_weights"] = {9: torch.zeros(1)}
    with pytest.raises(ValueError, match="has no parameter there"):
        optimizer.load_state_dict(state)


def test_weights_loaded_into_the_model_are_not_overwritten_by_old_masters() -> None:
    model, optimizer = _converted(torch.optim.SGD)
    train(model, optimizer, range(2))
    new = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(new)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(1))
    assert all(torch.equal(v, new[k]) for k, v in model.state_dict().items())


def test_an_overflow_leaves_everything_but_the_scale_as_it_was() -> None:
    model = mlp()
    raw = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(raw, 1, gamma=0.5)
    amp_model, optimizer = convert_to_naive_amp(
        model, raw, {"initial_scale": 2**30, "max_scale": 2**30, "hysteresis": 2, "backoff_factor": 2**-20}
    )
    assert isinstance(optimizer, NaiveAMPOptimizer)
    before = copy.deepcopy((amp_model.state_dict(), optimizer.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        scales = []
        for step in range(2):
            train(amp_model, optimizer, range(step, step + 1))
            scheduler.step()
            scales.append(optimizer.loss_scale)
            assert optimizer.step_was_skipped
    assert scales == [2**30, 2**10]
    assert all(torch.equal(v, before[0][k]) for k, v in amp_model.state_dict().items())
    assert all(torch.equal(p, q) for p, q in zip(optimizer.parameters(), before[1], strict=True))
    assert not raw.state
    train(amp_model, optimizer, range(1))
    assert not optimizer.step_was_skipped
    assert raw.state[optimizer.parameters()[0]]["step"] == 1  # a skipped step counts for nothing
    assert raw.param_groups[0]["lr"] == 0.0025


def test_skipped_steps_are_reported_once_and_again_when_they_persist() -> None:
    model, optimizer = _converted()
    with logged() as lines:
        for _ in range(100):
            optimizer.backward(model(batch()[0]).sum() * float("nan"))
            optimizer.step()
            optimizer.zero_grad()
        train(model, optimizer, range(1))
    told = [line for line in lines if "skipped" in line]
    assert len(told) == 3
    assert told[0].startswith(
        "Found overflow. Skip step: a gradient overflowed at loss scale 65536: this step is skipped, the next"
        " loss scale is 65536 still (it falls at a later overflow: see hysteresis"
    )
    assert told[1].startswith("10 steps in a row were skipped (10 in all), the loss scale is now 128")
    assert told[2].startswith("100 steps in a row were skipped (100 in all), the loss scale is now 1.")


def test_clipping_inside_equals_clipping_fp32() -> None:
    model, optimizer = _converted(torch.optim.SGD, clip_grad_norm=0.1)
    outside, other = _converted(torch.optim.SGD)
    x, y = batch()
    optimizer.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    other.backward(F.cross_entropy(outside(x), y))
    norm = other.clip_grad_by_norm(0.1)
    torch.testing.assert_close(other.clip_grad_by_norm(10.0), torch.tensor(0.1), rtol=1e-4, atol=0)
    other.step()
    assert optimizer.grad_norm is not None
    assert torch.equal(optimizer.grad_norm, norm)
    assert norm > 0.1
    for p, q in zip(optimizer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_clipping_by_value_and_the_order_of_things() -> None:
    model, optimizer = _converted(torch.optim.SGD)
    x, y = batch()
    optimizer.backward(F.cross_entropy(model(x), y))
    optimizer.clip_grad_by_value(1e-3)
    assert all(p.grad.abs().max() <= 1e-3 for p in optimizer.parameters())  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"gradients were unscaled already \(by clipping\)"):
        optimizer.backward(F.cross_entropy(model(x), y))
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model.parameters(), *optimizer.parameters()))
    optimizer.backward(F.cross_entropy(model(x), y) * float("inf"))
    with pytest.raises(
        RuntimeError, match=r"the norm of all gradients is (nan|inf), so they cannot be clipped"
    ):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


def test_accumulated_gradients_equal_one_batch() -> None:
    model, optimizer = _converted(torch.optim.SGD)
    other, other_optimizer = _converted(torch.optim.SGD)
    x, y = batch()
    for part in (slice(0, 4), slice(4, 8)):
        optimizer.backward(F.cross_entropy(model(x[part]), y[part]) / 2)
    optimizer.step()
    other_optimizer.backward(F.cross_entropy(other(x), y))
    other_optimizer.step()
    for p, q in zip(optimizer.parameters(), other_optimizer.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_zeros_in_the_gradients_are_counted_and_logged() -> None:
    model, optimizer = _converted(torch.optim.SGD, log_num_zeros_in_grad=True, verbose=True)
    with logged() as lines:
        x = batch()[0]
        x[:, 0] = 0  # the first column of the first weight gets no gradient
        optimizer.backward(model(x).square().sum() / 100)
        optimizer.step()
    assert optimizer.num_zeros_in_grad == 16
    assert "number of zeros in the gradients: 16" in lines


def test_verbose_tells_what_was_made() -> None:
    with logged() as lines:
        _converted(verbose=True)
    assert any(
        "NaiveAMPOptimizer: 4 master weights of 4 parameters, loss scale 65536" in line for line in lines
    )


def test_a_step_without_gradients_does_nothing() -> None:
    model, optimizer = _converted()
    before = copy.deepcopy(model.state_dict())
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_state_that_was_there_before_follows_its_parameter() -> None:
    model = mlp()
    raw = torch.optim.Adam(model.parameters(), lr=0.01)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    raw.step()
    raw.zero_grad()
    amp_model, optimizer = convert_to_naive_amp(model, raw)
    train(amp_model, optimizer, range(1))
    assert len(raw.state) == 4
    assert all(state["step"] == 2 for state in raw.state.values())


def test_bad_arguments_are_refused() -> None:
    raw = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"FP16Optimizer needs a grad_scaler such as DynamicGradScaler\(\), got 2"
    ):
        FP16Optimizer(raw, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FP16Optimizer needs clip_grad_norm >= 0"):
        FP16Optimizer(raw, DynamicGradScaler(), clip_grad_norm=-1)
    optimizer = FP16Optimizer(raw, DynamicGradScaler())
    with pytest.raises(ValueError, match="norm_type must be positive or inf, got 0"):
        optimizer.clip_grad_by_norm(1.0, norm_type=0)


@pytest.mark.parametrize("masters", [True, False])
def test_sparse_gradients_are_unscaled_and_checked(masters: bool) -> None:
    words = nn.Embedding(4, 2, sparse=True).half()
    before = words.weight.detach().clone()
    raw = torch.optim.SGD(words.parameters(), lr=1.0)
    optimizer = FP16Optimizer(raw, ConstantGradScaler(4.0), master_weights=masters)
    for factor in (1.0, float("nan")):
        optimizer.zero_grad()
        optimizer.backward(words(torch.tensor([1, 1])).float().sum() * factor)
        optimizer.step()
    assert optimizer.step_was_skipped
    torch.testing.assert_close(words.weight[1].detach(), before[1] - 2)
    assert torch.equal(words.weight[0], before[0])
