"""Schedules: batches of any shape through an engine."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.engine import Engine
from colossalai.engine.schedule import BaseSchedule, NonPipelineSchedule
from colossalai.engine.schedule.nest import batch_size, to_device
from colossalai.testing import assert_close
from tests.engine.plans import mlp, sgd

CRITERION = nn.CrossEntropyLoss()
X, Y = torch.ones(4, 6), torch.tensor([0, 1, 2, 0])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.body(x) * scale


class OwnLoss(nn.Module):
    """A model in the manner of Hugging Face: its output holds the loss."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body, self.form = mlp(), form

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.body(x), labels)
        Output = namedtuple("Output", "loss")
        return {"tensor": loss, "dict": {"loss": loss}, "object": Output(loss), "nothing": {"logits": x}}[
            self.form
        ]


def engine(model: nn.Module | None = None, criterion: Any = CRITERION, **options: Any) -> Engine:
    model = model or mlp()
    return Engine(model, sgd(model.parameters()), criterion, **options)


def test_a_step_returns_output_label_and_loss() -> None:
    own = engine()
    output, label, loss = own.execute_schedule(iter([(X, Y)]))
    assert output.shape == (4, 3)
    assert label is Y
    assert_close(loss, nn.functional.cross_entropy(mlp()(X), Y).detach())
    assert not loss.requires_grad
    assert own.schedule.batch_size == 4
    assert all(p.grad is not None for p in own.model.parameters())


def test_forward_only_leaves_no_gradient() -> None:
    own = engine()
    output, _, loss = own.execute_schedule(iter([(X, Y)]), forward_only=True)
    assert not output.requires_grad
    assert loss > 0
    assert all(p.grad is None for p in own.model.parameters())
    assert own.execute_schedule(iter([(X, Y)]), forward_only=True, return_loss=False)[2] is None
    assert own.execute_schedule(iter([(X, Y)]), return_output_label=False)[:2] == (None, None)
    with pytest.raises(ValueError, match="a backward pass needs the loss"):
        own.execute_schedule(iter([(X, Y)]), return_loss=False)


@pytest.mark.parametrize(
    "batch",
    [
        ((X, torch.tensor(2.0)), Y),
        [{"x": X, "scale": torch.tensor(2.0)}, Y],
        {"x": X, "scale": torch.tensor(2.0), "label": Y},
        {"x": X, "scale": torch.tensor(2.0), "labels": Y},
    ],
)
def test_batches_of_many_forms(batch: Any) -> None:
    _, label, loss = engine(TwoInputs()).execute_schedule(iter([batch]))
    assert label is Y
    assert_close(loss, nn.functional.cross_entropy(mlp()(X) * 2, Y).detach())


def test_a_function_makes_data_and_label() -> None:
    schedule = NonPipelineSchedule(lambda batch: ((batch[0], batch[1]), batch[2]))
    own = engine(TwoInputs(), schedule=schedule)
    loss = own.execute_schedule(iter([(X, torch.tensor(2.0), Y)]))[2]
    assert_close(loss, nn.functional.cross_entropy(mlp()(X) * 2, Y).detach())
    with pytest.raises(
        TypeError, match=r"data_process_func must return \(data, label\), got a tensor of shape"
    ):
        engine(schedule=NonPipelineSchedule(lambda batch: batch[0])).execute_schedule(iter([(X, Y)]))
    with pytest.raises(TypeError, match=r"data_process_func is a function .* got 3"):
        NonPipelineSchedule(3)  # type: ignore[arg-type]


def test_a_batch_that_is_not_a_pair_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a batch of 3 items is not \(data, label\); give .* data_process_func"
    ):
        engine().execute_schedule(iter([(X, X, Y)]))


@pytest.mark.parametrize("form", ["tensor", "dict", "object"])
def test_a_model_with_its_own_loss_needs_no_criterion(form: str) -> None:
    loss = engine(OwnLoss(form), None).execute_schedule(iter([{"x": X, "labels": Y}]))[2]
    assert_close(loss, nn.functional.cross_entropy(mlp()(X), Y).detach())


def test_no_loss_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"model, which has no criterion, must return the loss .* got NoneType"
    ):
        engine(OwnLoss("nothing"), None).execute_schedule(iter([{"x": X, "labels": Y}]))
    with pytest.raises(
        TypeError, match=r"criterion must return the loss .* got a tuple of 2; return the loss"
    ):
        engine(criterion=lambda o, t: (o.sum(), t)).execute_schedule(iter([(X, Y)]))
    with pytest.raises(TypeError, match=r"got a tensor of shape \(4,\)"):
        engine(criterion=nn.CrossEntropyLoss(reduction="none")).execute_schedule(iter([(X, Y)]))


def test_labels_in_tuples_and_dicts_and_none_reach_the_criterion() -> None:
    def criterion(output: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        seen.append((a, b))
        return output.sum()

    seen: list[Any] = []
    for label in ((1, 2), {"a": 1, "b": 2}):
        engine(criterion=criterion).execute_schedule(iter([(X, label)]))
    engine(criterion=criterion).execute_schedule(iter([X]))
    assert seen == [(1, 2), (1, 2), (None, None)]


class ByDocument(BaseSchedule):
    """As page 05 says: inherit BaseSchedule and implement forward_back_step."""

    def forward_back_step(self, engine: Engine, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        x, y = self.load_batch(data_iter)
        loss = engine.criterion(engine(x), y)  # type: ignore[misc]
        engine.backward(loss)
        return None, y, loss


class Unfinished(BaseSchedule):
    pass


def test_schedules_of_users_under_both_names() -> None:
    _, label, loss = engine(schedule=ByDocument()).execute_schedule(iter([(X, Y)]))
    assert label is Y
    assert loss.requires_grad
    assert NonPipelineSchedule().forward_back_step(engine(), iter([(X, Y)]))[1] is Y
    with pytest.raises(TypeError, match="Unfinished must implement forward_backward_step"):
        engine(schedule=Unfinished()).execute_schedule(iter([(X, Y)]))


def test_nests_move_whole() -> None:
    Pair = namedtuple("Pair", "a b")
    nest = {"p": Pair(X, [Y, "text"]), "n": None, "t": (X,)}
    moved = to_device(nest, torch.device("meta"))
    assert isinstance(moved["p"], Pair)
    assert moved["p"].a.is_meta
    assert moved["p"].b[0].is_meta
    assert moved["p"].b[1] == "text"
    assert moved["n"] is None
    assert moved["t"][0].is_meta
    assert [batch_size(n) for n in (nest, torch.tensor(1.0), "text", [torch.tensor(1.0), X])] == [4, 0, 0, 4]


def test_a_batch_may_stay_where_it_is() -> None:
    own = engine()
    own.schedule._device = torch.device("meta")
    assert own.schedule.load_batch(iter([X])).is_meta
    assert own.schedule.load_batch(iter([X]), to_gpu=False) is X


def test_the_end_of_the_data_and_a_loader_instead_of_its_iterator() -> None:
    own, batches = engine(), iter([(X, Y)])
    own.execute_schedule(batches)
    with pytest.raises(RuntimeError, match=r"execute_schedule has no batch left: .* take iter\(dataloader\)"):
        own.execute_schedule(batches)
    with pytest.raises(TypeError, match=r"takes the next batch of an iterator, got list; call iter\(\)"):
        own.execute_schedule([(X, Y)])  # type: ignore[arg-type]
