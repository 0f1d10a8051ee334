"""The trainer's loops: order of hooks, epochs and steps, progress, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.testing import assert_close
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader
from tests.engine.plans import data, loader, logged, mlp, sgd


def make_engine(model: nn.Module | None = None) -> Engine:
    model = model or mlp()
    return Engine(model, sgd(model.parameters()), nn.CrossEntropyLoss())


class Recorder(hooks.BaseHook):
    """Writes down every moment."""

    def __init__(self, events: list[str], name: str = "", priority: int = 10) -> None:
        super().__init__(priority)
        self.events, self.name = events, name

    def __getattribute__(self, moment: str) -> Any:
        if moment.startswith(("before_", "after_")):
            return lambda trainer, *args: self.events.append(self.name + moment)
        return super().__getattribute__(moment)


def test_the_order_of_all_moments() -> None:
    events: list[str] = []
    Trainer(make_engine()).fit(loader(4, 2), 1, test_dataloader=loader(2, 2), hooks=[Recorder(events)])
    assert events == [
        "after_hook_is_attached",
        "before_train",
        "before_train_epoch",
        *["before_train_iter", "after_train_iter"] * 2,
        "after_train_epoch",
        "before_test",
        "before_test_epoch",
        *["before_test_iter", "after_test_iter"],
        "after_test_epoch",
        "after_test",
        "after_train",
    ]


def test_hooks_come_by_priority() -> None:
    events: list[str] = []
    attached = [Recorder(events, "late ", 20), Recorder(events, "early ", 0), Recorder(events, "same ", 20)]
    Trainer(make_engine()).evaluate(loader(2, 2), hooks=attached)
    assert events[:3] == [f"{name} after_hook_is_attached" for name in ("early", "late", "same")]


def test_training_equals_a_plain_loop() -> None:
    engine, plain = make_engine(), mlp()
    optimizer = sgd(plain.parameters())
    trainer = Trainer(engine)
    trainer.fit(loader(8, 2), 2)
    for x, y in [*loader(8, 2), *loader(8, 2)]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for p, q in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert_close(p, q)
    assert (trainer.cur_epoch, trainer.cur_step, trainer.max_epochs, trainer.max_steps) == (1, 8, 2, None)
    assert trainer.steps_per_epoch == 4
    assert trainer.engine is engine


def test_tests_come_every_interval() -> None:
    events: list[str] = []
    Trainer(make_engine()).fit(
        loader(2, 2), 5, test_dataloader=loader(2, 2), test_interval=2, hooks=[Recorder(events)]
    )
    assert events.count("before_test") == 2


def test_max_steps_end_the_training() -> None:
    trainer = Trainer(make_engine())
    with logged() as messages:
        trainer.fit(loader(8, 2), 5, max_steps=6)
    assert (trainer.cur_step, trainer.cur_epoch) == (6, 1)
    assert messages[-1] == "Max number of steps 6 has been reached, training is stopped automatically"


def test_a_second_fit_starts_anew_and_cur_epoch_resumes() -> None:
    trainer = Trainer(make_engine())
    trainer.fit(loader(4, 2), 2)
    trainer.fit(loader(4, 2), 3)
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 6)
    trainer.cur_epoch, trainer.cur_step = 2, 4
    trainer.fit(loader(4, 2), 3)
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 6)
    with pytest.raises(ValueError, match=r"cur_epoch is the epoch to begin with, 0 or more; got -1"):
        trainer.cur_epoch = -1


def test_a_resumed_run_sees_the_data_in_the_same_order() -> None:
    class Keep(hooks.BaseHook):
        def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
            labels.append(label)

    labels: list[torch.Tensor] = []
    Trainer(make_engine()).fit(get_dataloader(data(8), shuffle=True, batch_size=8), 3, hooks=[Keep()])
    trainer = Trainer(make_engine())
    trainer.cur_epoch = 2
    trainer.fit(get_dataloader(data(8), shuffle=True, batch_size=8), 3, hooks=[Keep()])
    assert torch.equal(labels[2], labels[3])
    assert not torch.equal(labels[0], labels[2])


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = data(samples)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[i] for i in range(len(self.samples))])


def test_data_without_a_length() -> None:
    trainer = Trainer(make_engine())
    trainer.fit(DataLoader(Stream(6), batch_size=2), 2)
    assert (trainer.steps_per_epoch, trainer.cur_step) == (3, 6)


def test_empty_data_are_refused() -> None:
    trainer = Trainer(make_engine())
    message = r"train_dataloader gave no batch: is the dataset empty"
    with pytest.raises(ValueError, match=message):
        trainer.fit([], 1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(DataLoader(Stream(0)), 1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(iter([*loader(4, 2)]), 2)  # used up after one epoch
    with pytest.raises(ValueError, match="test_dataloader gave no batch"):
        trainer.fit(loader(4, 2), 1, test_dataloader=[])
    with pytest.raises(ValueError, match="test_dataloader gave no batch"):
        trainer.evaluate([])


def test_the_end_of_data_is_not_confused_with_a_mistake() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise StopIteration("a mistake in the model")

    broken = nn.Sequential(mlp(), Broken())
    with pytest.raises(StopIteration, match="a mistake in the model"):
        Trainer(make_engine(broken)).fit(loader(4, 2), 1)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"needs the engine that colossalai.initialize returned, got Sequential"
    ):
        Trainer(mlp())  # type: ignore[arg-type]
    trainer = Trainer(make_engine())
    for name, value in (
        ("epochs", 0),
        ("max_steps", 0),
        ("test_interval", 1.5),
        ("epochs", True),
        ("epochs", None),
    ):
        options: dict[str, Any] = {"epochs": 1, name: value}
        with pytest.raises(ValueError, match=f"fit needs {name} as a whole number of at least 1, got"):
            trainer.fit(loader(2, 2), **options)
    with pytest.raises(TypeError, match=r"fit needs train_dataloader as a data loader or .*, got None"):
        trainer.fit(None, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"evaluate needs test_dataloader as a data loader or .*, got 5"):
        trainer.evaluate(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"hooks inherit .*BaseHook, got .*LossHook.* \(a class: call it\)"):
        trainer.fit(loader(2, 2), 1, hooks=[hooks.LossHook])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="the priority of a hook is a number, but LossHook has 'high'"):
        trainer.fit(loader(2, 2), 1, hooks=[hooks.LossHook(priority="high")])  # type: ignore[arg-type]


def test_prediction() -> None:
    engine = make_engine(nn.Sequential(mlp(), nn.Dropout()))
    trainer, x = Trainer(engine), torch.ones(2, 6)
    expected = mlp()(x).detach()
    for given in (x, [x], {"input": x}):
        output = trainer.predict(given)
        assert not output.requires_grad
        assert_close(output, expected)
    assert engine.model.training, "as before"


def test_timers_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    timer = MultiTimer()
    trainer = Trainer(make_engine(), timer, get_dist_logger())
    attached = [
        hooks.LossHook(),
        hooks.AccuracyHook(lambda o, t: (o.argmax(-1) == t).sum()),
        hooks.LogMetricByStepHook(),
    ]
    trainer.fit(loader(4, 2), 2, test_dataloader=loader(2, 2), hooks=attached, display_progress=True)
    assert {name for name, _ in timer} == {"Train-epoch", "Train-step", "Test-epoch", "Test-step"}
    trainer.evaluate(loader(4, 2), hooks=attached, display_progress=True)
    bars = capsys.readouterr().err
    for text in (
        "[Epoch 0 / Train]",
        "[Epoch 1 / Train]",
        "[Epoch 1 / Test]",
        "Evaluation",
        "2/2",
        "loss=",
        "accuracy=",
    ):
        assert text in bars
    trainer.fit(loader(4, 2), 1)
    assert capsys.readouterr().err == "", "no progress unless asked for"
