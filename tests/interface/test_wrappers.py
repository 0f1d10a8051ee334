from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from colossalai.booster import Booster
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.mesh import Mesh
from colossalai.testing import fake_world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))
        self.config = {"width": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def generate(self) -> str:
        return "text"


def _trained() -> tuple[nn.Linear, OptimizerWrapper]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = OptimizerWrapper(torch.optim.Adam(model.parameters(), lr=0.1))
    optimizer.backward(model(torch.ones(4, 3)).square().sum())
    optimizer.step()
    return model, optimizer


def test_a_wrapped_model_has_the_names_values_and_attributes_of_the_model() -> None:
    net = Net()
    model = ModelWrapper(ModelWrapper(net))
    x = torch.randn(5, 3)
    assert torch.equal(model(x), net(x))
    assert model.unwrap() is net
    assert model.config is net.config
    assert model.generate() == "text"
    assert list(model.state_dict()) == list(net.state_dict())
    assert [n for n, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert [n for n, _ in model.named_buffers()] == ["count"]
    assert list(model.named_parameters(recurse=False)) == []
    assert next(model.parameters()) is net.linear.weight
    model.eval()
    assert not net.linear.training
    model.to(torch.float64)
    assert net.linear.weight.dtype is torch.float64
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = model.absent


def test_a_wrapped_model_loads_a_plain_state_dict() -> None:
    source, model = Net(), ModelWrapper(Net())
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.unwrap().linear.weight, source.linear.weight)  # type: ignore[union-attr]


def test_parameters_of_a_wrapped_model_are_not_replaced_by_those_that_are_loaded() -> None:
    wrapped = ModelWrapper(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"assign=True\) would put other parameters into the Linear"):
        wrapped.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)


def test_a_wrapped_model_inside_a_larger_module_round_trips() -> None:
    larger, other = nn.Sequential(ModelWrapper(Net())), nn.Sequential(ModelWrapper(Net()))
    other.load_state_dict(larger.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(larger.parameters(), other.parameters(), strict=True))


def test_a_wrapped_model_copies_and_pickles() -> None:
    model = ModelWrapper(Net())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.linear.weight, model.linear.weight)
        assert twin.linear.weight is not model.linear.weight


def test_only_modules_and_optimizers_are_wrapped() -> None:
    with pytest.raises(TypeError, match=r"ModelWrapper wraps a torch.nn.Module, got function"):
        ModelWrapper(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"OptimizerWrapper wraps a torch.optim.Optimizer, got Linear"):
        OptimizerWrapper(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_wrapped_optimizer_shares_everything_with_the_optimizer() -> None:
    _, optimizer = _trained()
    inner = optimizer.unwrap()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.load_state_dict(optimizer.state_dict())  # replaces the inner groups by new ones
    assert optimizer.param_groups is inner.param_groups
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert len(optimizer.parameters()) == 3
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state"))
    optimizer.step()
    optimizer.state_dict()
    assert calls == ["step", "state"]
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.parameters())
    assert "Adam" in repr(optimizer)
    assert OptimizerWrapper(optimizer).unwrap() is inner


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=6)


def _step_lr(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5)


@pytest.mark.parametrize("make", [_step_lr, _one_cycle])
@pytest.mark.parametrize("before", [True, False])
def test_schedulers_built_before_and_after_wrapping_agree_with_torch(
    make: Callable[[torch.optim.Optimizer], LRScheduler], before: bool
) -> None:
    def rates(wrap: bool) -> list[float]:
        raw = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = make(raw) if before or not wrap else None
        optimizer: torch.optim.Optimizer = OptimizerWrapper(raw) if wrap else raw
        scheduler = scheduler or make(optimizer)
        seen = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch warns when a scheduler believes that no optimizer step was made
        assert rates(wrap=True) == rates(wrap=False)


def test_a_copy_of_an_optimizer_leaves_the_mesh_to_its_job() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = Mesh({"tp": 2})
        optimizer = OptimizerWrapper(OptimizerWrapper(_trained()[1].unwrap(), mesh))
        assert optimizer.mesh is mesh
        assert pickle.loads(pickle.dumps(optimizer)).mesh is None


def test_a_wrapped_optimizer_pickles_also_with_a_scheduler_attached() -> None:
    _, optimizer = _trained()
    StepLR(optimizer, step_size=1)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [s["step"] for s in twin.state.values()] == [1, 1]
    for p in twin.parameters():
        p.grad = torch.ones_like(p)
    twin.step()
    assert [s["step"] for s in twin.state.values()] == [2, 2]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))


def test_clipping_equals_torch() -> None:
    for clip, reference in (
        (lambda o: o.clip_grad_by_norm(0.5), lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
        (lambda o: o.clip_grad_by_norm(0.5, 1.0), lambda p: nn.utils.clip_grad_norm_(p, 0.5, 1.0)),
        (lambda o: o.clip_grad_by_value(0.1), lambda p: nn.utils.clip_grad_value_(p, 0.1)),
    ):
        model, optimizer = _trained()
        twin = copy.deepcopy(model)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        norm, expected = clip(optimizer), reference(twin.parameters())
        assert (norm is None) == (expected is None)
        if norm is not None:
            assert torch.equal(norm, expected)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_norm_that_is_not_finite_can_be_an_error() -> None:
    model, optimizer = _trained()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="norm of all gradients is inf, so they cannot be clipped"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def test_without_gradients_there_is_nothing_to_clip() -> None:
    model, optimizer = _trained()
    optimizer.zero_grad()
    optimizer.clip_grad_by_value(0.1)
    assert optimizer.clip_grad_by_norm(1.0) == 0
    assert model.weight.grad is None


def test_a_negative_norm_is_refused_instead_of_turning_gradients_around() -> None:
    optimizer = OptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(ValueError, match=r"max_norm of at least 0, got -1\.0"):
        optimizer.clip_grad_by_norm(-1.0)


def test_the_names_of_the_older_interface() -> None:
    from colossalai.interface import ColossalaiOptimizer
    from colossalai.nn.optimizer import ColossalaiOptimizer as FromOldPlace

    assert FromOldPlace is ColossalaiOptimizer
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    twin = copy.deepcopy(model)
    inner = Told(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = ColossalaiOptimizer(inner)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for clip in (0.01, 100.0):
        y = model(x)
        (slope,) = torch.autograd.grad(y.square().sum() * 2, y, retain_graph=True)
        optimizer.backward_by_grad(y, slope)
        assert inner.expected, "a plan must know that gradients come"
        norm = optimizer.clip_grad_norm(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        (twin(x).square().sum() * 2).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), clip))
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(model.weight, twin.weight)
    assert optimizer.param_groups is inner.optim.param_groups
    assert optimizer.unwrap() is inner.optim


class Told(OptimizerWrapper):
    """A plan that wants to know of gradients that come from elsewhere."""

    expected = False

    def expect_gradients(self) -> None:
        self.expected = True


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_attributes_set_after_boost_are_those_of_the_users_module() -> None:
    model, *_ = Booster(device="cpu").boost(_Scaled())
    before = model(torch.ones(1, 2))
    model.scale = 2.0
    model.note = "new"
    assert torch.equal(model(torch.ones(1, 2)), 2 * before)
    assert model.unwrap().note == model.note == "new"
    model.layer = nn.Linear(2, 3)  # without a plan nobody keeps the parameters
    assert model(torch.ones(1, 2)).shape == (1, 3)
    model.eval()
    assert not model.training
    with pytest.raises(AttributeError, match=r"model\.forward = \.\.\. after boost .* before boost"):
        model.forward = lambda x: x


def test_parts_of_a_model_whose_parameters_a_plan_keeps_are_not_replaced() -> None:
    class Kept(ModelWrapper):
        keeps_parameters = True

    model = Kept(_Scaled())
    model.own = 1  # before it is handed over, an attribute of the wrapper
    model.hand_over()
    model.own = 2
    assert not hasattr(model.unwrap(), "own")
    model.layer = model.unwrap().layer  # nothing changes
    model.float().to("cpu")  # as it is
    with pytest.raises(
        RuntimeError, match=r"from torch\.float32 on cpu to torch\.float16 on cpu after boost"
    ):
        model.half()
    for name, value in (("layer", nn.Linear(2, 2)), ("more", nn.Linear(2, 2)), ("layer", None)):
        with pytest.raises(
            RuntimeError, match=rf"model\.{name} = \.\.\. after boost: Kept keeps .* change the model before"
        ):
            setattr(model, name, value)
