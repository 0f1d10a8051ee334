"""The engine itself: its calls, its hooks, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.engine import BaseOpHook, Engine
from colossalai.interface import LossWatch, OptimizerWrapper
from colossalai.testing import assert_close
from tests.engine.plans import logged, mlp, sgd

X, Y = torch.ones(4, 6), torch.tensor([0, 1, 2, 0])


def engine(model: nn.Module | None = None, **options: Any) -> Engine:
    model = model or mlp()
    return Engine(model, sgd(model.parameters()), nn.CrossEntropyLoss(), **options)


def test_an_engine_can_be_made_by_hand() -> None:
    own, plain = engine(clip_grad_norm=0.1), mlp()
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        own.zero_grad()
        loss = own.criterion(own(X), Y)  # type: ignore[misc]
        own.backward(loss)
        own.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X), Y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    for p, q in zip(own.model.parameters(), plain.parameters(), strict=True):
        assert_close(p, q)
    assert isinstance(own.optimizer, OptimizerWrapper)
    assert not own.uses_pipeline
    own.eval()
    assert not own.model.training
    own.train()
    assert own.model.training


def test_backward_by_grad() -> None:
    own, plain = engine(), mlp()
    grad = torch.randn(4, 3)
    own.backward_by_grad(own(X), grad)
    plain(X).backward(grad)
    for p, q in zip(own.model.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad)


class Recorder(BaseOpHook):
    def __init__(self) -> None:
        self.events: list[str] = []

    def pre_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        self.events.append("forward")

    def post_fwd_exec(self, module: nn.Module, *args: Any) -> None:
        self.events.append("forwarded")

    def pre_bwd_exec(self, module: nn.Module, input: Any, output: Any) -> None:
        self.events.append("backward")

    def post_bwd_exec(self, module: nn.Module, input: Any) -> None:
        self.events.append("backwarded")

    def post_iter(self) -> None:
        self.events.append("end")


def test_operator_hooks_see_every_layer() -> None:
    hook = Recorder()
    own = engine(ophook_list=[hook])
    own.add_hook(hook)  # a second time changes nothing
    assert own.ophooks == [hook]
    own.execute_schedule(iter([(X.requires_grad_(), Y)]))
    own.step()
    X.requires_grad_(False)
    layers = ["forward", "forwarded"] * 2 + ["backward", "backwarded"] * 2
    assert hook.events == [*layers, "end"]
    own.remove_hook(hook)
    own.execute_schedule(iter([(X, Y)]))
    own.step()
    assert len(hook.events) == 9
    with pytest.raises(ValueError, match="is not a hook of this engine"):
        own.remove_hook(hook)
    with pytest.raises(TypeError, match=r"operator hook inherits .*BaseOpHook, got 'hook'"):
        own.add_hook("hook")  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_reported_once() -> None:
    own = engine()
    x = X.clone()
    x[0, 0] = float("nan")
    with logged() as messages:
        own.execute_schedule(iter([(X, Y)]))
        assert messages == []
        for _ in range(3):
            loss = own.execute_schedule(iter([(x, Y)]))[2]
    assert loss.isnan(), "reported, not hidden"
    assert "".join(messages).count("the loss is nan or infinite (backward pass 2)") == 1


def test_losses_that_are_bad_now_and_then_are_reported_once() -> None:
    own = engine()
    with logged() as messages:
        for i in range(6):
            own.execute_schedule(iter([(X * (float("inf") if i % 2 else 1.0), Y)]))
    assert len([m for m in messages if "the loss is nan or infinite" in m]) == 1
    assert "the weights may be lost" in messages[-1]


def test_a_bad_loss_whose_step_is_skipped_loses_no_weights() -> None:
    watch = LossWatch()
    with logged() as messages:
        watch.see(torch.tensor(float("nan")), skips_steps=True)
    assert "(backward pass 1): the step is skipped" in messages[-1]
    assert "lost" not in messages[-1]


def test_losses_on_a_device_are_looked_at_in_bundles() -> None:
    watch = LossWatch()
    with logged() as messages:
        for value in (1.0, float("inf"), 1.0):
            watch._seen += 1
            watch._bad = torch.tensor(value == float("inf")) | (
                watch._bad if watch._bad is not None else False
            )
        watch.report()
        watch.report()
    assert "(backward passes 1 to 3)" in messages[-1]
    assert len(messages) == 1, "one line, once"


def test_a_frozen_model_is_refused_when_it_is_to_learn() -> None:
    own = engine(mlp().requires_grad_(False))
    assert own.execute_schedule(iter([(X, Y)]), forward_only=True)[2] > 0
    with pytest.raises(RuntimeError, match=r"loss does not depend on a parameter to train.* frozen"):
        own.execute_schedule(iter([(X, Y)]))
    with torch.no_grad():
        output = engine()(X)
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        engine().backward_by_grad(output, torch.ones(4, 3))


def test_a_partly_frozen_model_learns() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    before = [p.clone() for p in model.parameters()]
    own = engine(model, clip_grad_norm=1.0)
    own.execute_schedule(iter([(X, Y)]))
    own.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


def test_wrong_arguments_are_refused() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    with pytest.raises(TypeError, match="needs model as a torch Module, got 3"):
        Engine(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs optimizer as a torch Optimizer, got None"):
        Engine(model, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="criterion of an Engine is a function"):
        Engine(model, optimizer, "loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"clip_grad_norm must be 0 .* got -1"):
        Engine(model, optimizer, clip_grad_norm=-1)
    with pytest.raises(TypeError, match=r"schedule of an Engine is an instance of .*BaseSchedule"):
        Engine(model, optimizer, schedule="pipeline")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"needs the loss as one tensor, got tuple; what does the criterion"):
        Engine(model, optimizer).backward((1, 2))  # type: ignore[arg-type]
