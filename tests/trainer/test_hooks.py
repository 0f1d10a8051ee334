"""The hooks: what they measure, log, write and step."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.registry import HOOKS
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, load_checkpoint, throughput
from tests.engine.plans import data, initialize, launch, loader, logged, mlp, sgd


class Still(nn.Module):
    """A model whose outputs are its inputs, so that metrics are known beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def mean(output: Tensor, label: Tensor | None = None) -> Tensor:
    return output.detach().mean() + 0 * output.mean()  # a loss that teaches nothing


def still(lr: float = 0.1) -> Engine:
    model = Still()
    return Engine(model, torch.optim.SGD(model.parameters(), lr=lr), mean)


def rows(*classes: int) -> Tensor:
    return nn.functional.one_hot(torch.tensor(classes), 3).float()


BATCHES = [(rows(0, 1) * 3, torch.tensor([0, 2])), (rows(2, 2) * 6, torch.tensor([2, 2]))]  # losses 1 and 2


def test_metrics_of_an_epoch_and_of_a_step() -> None:
    trainer = Trainer(still())
    trainer.fit(
        BATCHES, 2, test_dataloader=BATCHES[:1], hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy())]
    )
    train, test = trainer.states["metrics"]["train"], trainer.states["metrics"]["test"]
    assert train["Loss"].get_accumulated_value() == 1.5
    assert train["Loss"].get_last_step_value() == 2.0
    assert train["Accuracy"].get_accumulated_value() == 0.75
    assert train["Accuracy"].get_last_step_value() == 1.0
    assert test["Loss"].get_accumulated_value() == 1.0
    assert test["Accuracy"].get_accumulated_value() == 0.5
    assert (train["Loss"].epoch_only, test["Loss"].epoch_only) == (False, True)
    better = [hooks.LossMetric, hooks.AccuracyMetric, hooks.ThroughputMetric, hooks.LearningRateMetric]
    assert [metric.is_better(0.1, 0.2) for metric in better] == [True, False, False, False]  # type: ignore[attr-defined]
    empty = hooks.LossMetric(epoch_only=True), hooks.AccuracyMetric(True, Accuracy())
    assert all(metric.get_accumulated_value() != metric.get_accumulated_value() for metric in empty), "nan"


def test_epochs_in_the_log() -> None:
    engine = still(0.1)
    scheduler = StepLR(engine.optimizer.unwrap(), 1, gamma=0.5)
    attached = [
        hooks.LogMetricByEpochHook(get_dist_logger()),
        hooks.LossHook(),
        hooks.LRSchedulerHook(scheduler, by_epoch=True),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
    ]
    with logged() as messages:
        Trainer(engine).fit(BATCHES, 2, test_dataloader=BATCHES[:1], hooks=attached)
    assert [m for m in messages if m.startswith("[")] == [
        "[Epoch 0 / Train]: Loss = 1.5 | Accuracy = 0.75 | LR = 0.05",
        "[Epoch 0 / Test]: Loss = 1 | Accuracy = 0.5",
        "[Epoch 1 / Train]: Loss = 1.5 | Accuracy = 0.75 | LR = 0.025",
        "[Epoch 1 / Test]: Loss = 1 | Accuracy = 0.5",
    ]


def test_logging_every_other_epoch() -> None:
    attached = [hooks.LossHook(), hooks.LogMetricByEpochHook(get_dist_logger(), interval=2)]
    with logged() as messages:
        Trainer(still()).fit(BATCHES, 4, hooks=attached)
    assert [m[:9] for m in messages if m.startswith("[")] == ["[Epoch 1 ", "[Epoch 3 "]
    with pytest.raises(ValueError, match="LogMetricByEpochHook needs an interval of at least 1 epoch, got 0"):
        hooks.LogMetricByEpochHook(get_dist_logger(), interval=0)


def test_steps_on_the_bar() -> None:
    seen = []

    class Look(hooks.BaseHook):
        def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
            seen.append(dict(trainer.states["step_metrics"]))

    Trainer(still()).fit(BATCHES, 1, hooks=[Look(20), hooks.LogMetricByStepHook(), hooks.LossHook()])
    assert seen == [{"loss": "1"}, {"loss": "2"}]


def test_accuracy_needs_outputs_and_labels() -> None:
    attached = [hooks.AccuracyHook(Accuracy())]
    with pytest.raises(ValueError, match=r"needs outputs and labels; .* return_output_label=True"):
        Trainer(still()).fit(BATCHES, 1, hooks=attached, return_output_label=False)
    model = Still()
    engine = Engine(model, sgd(model.parameters()), mean)
    with pytest.raises(ValueError, match="AccuracyHook needs labels, got NoneType"):
        Trainer(engine).fit([rows(1)], 1, hooks=attached)
    with pytest.raises(TypeError, match=r"accuracy_func is a function of outputs and labels, got 0.5"):
        hooks.AccuracyHook(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two hooks measure 'Loss'; attach LossHook once"):
        Trainer(still()).fit(BATCHES, 1, hooks=[hooks.LossHook(), hooks.LossHook()])


def test_the_scheduler_by_epoch_and_by_iteration() -> None:
    for by_epoch, expected in ((True, 0.25), (False, 0.0625)):
        engine = still(1.0)
        scheduler = StepLR(engine.optimizer.unwrap(), 1, gamma=0.5)
        trainer = Trainer(engine)
        trainer.fit(BATCHES, 2, hooks=[hooks.LRSchedulerHook(scheduler, by_epoch)])
        metric = trainer.states["metrics"]["train"]["LR"]
        assert metric.get_accumulated_value() == metric.get_last_step_value() == expected
        assert metric.epoch_only == by_epoch
        assert engine.optimizer.param_groups[0]["lr"] == expected
    trainer.fit(BATCHES, 1, hooks=[hooks.LRSchedulerHook(scheduler, True, store_lr_in_state=False)])
    assert "metrics" not in trainer.states
    with pytest.raises(TypeError, match="LRSchedulerHook needs a learning-rate scheduler, got None"):
        hooks.LRSchedulerHook(None, by_epoch=True)
    with pytest.raises(TypeError, match=r"LRSchedulerHook needs by_epoch as True .* or False .*, got 'yes'"):
        hooks.LRSchedulerHook(scheduler, by_epoch="yes")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"LRSchedulerHook got a StepLR of another optimizer than the engine's"
    ):
        trainer.fit(BATCHES, 1, hooks=[hooks.LRSchedulerHook(StepLR(sgd(mlp().parameters()), 1), True)])
    with pytest.raises(TypeError, match=r"LogMetricByEpochHook needs a logger, such as .*, got None"):
        hooks.LogMetricByEpochHook(None)  # type: ignore[arg-type]


def test_a_schedule_that_has_ended_is_reported() -> None:
    engine = still(1.0)
    scheduler = CosineAnnealingLR(engine.optimizer.unwrap(), T_max=2)
    with logged() as messages:
        Trainer(engine).fit(BATCHES, 2, hooks=[hooks.LRSchedulerHook(scheduler, by_epoch=True)])
        assert messages == [], "as many steps as it was made for"
        Trainer(engine).fit(BATCHES, 2, hooks=[hooks.LRSchedulerHook(scheduler, by_epoch=True)])
    text = "".join(messages)
    assert text.count("(CosineAnnealingLR) was made for 2 steps and is stepped beyond its end") == 1
    assert "number of epochs of the whole training" in text


def test_timing_in_the_log() -> None:
    timer = MultiTimer()
    hook = hooks.LogTimingByEpochHook(timer, get_dist_logger(), ignore_num_train_steps=1)
    with logged() as messages:
        Trainer(still(), timer).fit(BATCHES, 2, test_dataloader=BATCHES, hooks=[hook])
    number = r"[\d.e+-]+"
    lines = [m for m in messages if m.startswith("[")]
    assert re.fullmatch(
        rf"\[Epoch 1 / Train\]: Train-epoch: last = {number} s \| Train-step: last = {number} s, mean ="
        f" {number} s"
        r" \| #steps/epoch = 2",
        lines[2],
    )
    assert re.fullmatch(
        rf"\[Epoch 1 / Test\]: Test-epoch: last = {number} s \| Test-step: last = {number} s, mean ="
        f" {number} s",
        lines[3],
    )
    assert len(hook._steps["Train-step"]) == 3, "the first of four does not count"
    with pytest.raises(ValueError, match="needs the timer of the trainer; pass one timer to both"):
        Trainer(still()).fit(BATCHES, 1, hooks=[hook])


def test_memory_in_the_log() -> None:
    with logged() as messages:
        Trainer(still()).fit(
            BATCHES, 1, test_dataloader=BATCHES, hooks=[hooks.LogMemoryByEpochHook(get_dist_logger())]
        )
    starts = [m.split(":")[0] for m in messages if "resident" in m or "allocated" in m]
    assert starts == ["Before-train", "[Epoch 0 / Train]", "[Epoch 0 / Test]"]


def test_throughput_with_tflops() -> None:
    metric = hooks.ThroughputMetric(epoch_only=False, ignored_steps=1, tflop_per_step=8)
    assert metric.get_accumulated_value() == metric.get_last_step_value() == 0.0
    metric.update(10, 100.0)  # warm-up
    metric.update(10, 2.0)
    metric.update(30, 2.0)
    assert metric.get_accumulated_value() == 10.0
    assert metric.get_last_step_value() == 15.0
    assert metric.get_last_step_info() == "15 sample_per_sec, 4 Tflops"
    assert metric.describe_accumulated() == "10 sample_per_sec, 4 Tflops"
    metric.reset()
    assert metric.describe_accumulated() == "0 sample_per_sec, 0 Tflops"

    trainer = Trainer(still())  # its timer is off, until the hook needs it
    with logged() as messages:
        trainer.fit(
            BATCHES,
            1,
            hooks=[hooks.ThroughputHook(), hooks.LogMetricByEpochHook(get_dist_logger(), priority=11)],
        )
    assert re.search(r"\[Epoch 0 / Train\]: Throughput = [\d.e+]+ sample_per_sec$", messages[-1])


def test_throughput_counts_tokens_and_operations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(throughput, "peak_tflops", lambda: 1e-3)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 6))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, _: out.mean())
    texts = [(torch.ones(n, 3, dtype=torch.long), torch.ones(n)) for n in (2, 2, 1)]
    trainer = Trainer(engine)
    file = tmp_path / "metrics.jsonl"
    hook, writes = hooks.ThroughputHook(), hooks.JSONLinesHook(file)
    trainer.fit(texts, 2, test_dataloader=texts, hooks=[hook, writes])
    written = json.loads(file.read_text().splitlines()[-1])
    assert {"Throughput/test", "Tokens_per_sec/test", "Tflops/test", "MFU/test"} <= written.keys()
    assert written["MFU/test"] == pytest.approx(1e3 * written["Tflops/test"])
    assert written["Tokens_per_sec/test"] == pytest.approx(3 * written["Throughput/test"])
    product = 2 * 3 * 4 * 6  # of one sample; backward has two
    for mode, products in (("train", 3), ("test", 1)):
        metric = hook.metrics[mode]
        assert metric._tokens == 15
        assert metric._tflop == pytest.approx(5 * products * product / 1e12)
    assert re.fullmatch(
        r"\S+ sample_per_sec, \S+ token_per_sec, \S+ Tflops, MFU \S+%", metric.describe_accumulated()
    )
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(texts, 1, hooks=[hooks.ThroughputHook(), Failing()])
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode(), "a failed step is not counted on"


def test_profile_of_some_steps(tmp_path: Path) -> None:
    engine = Engine(model := nn.Linear(3, 3), sgd(model.parameters()), lambda out, _: out.mean())
    batches = [(torch.ones(2, 3), torch.ones(2))] * 4
    hook = hooks.ProfileHook(tmp_path / "traces", skip=1, warmup=1, steps=1, profile_memory=True)
    for _ in range(2):  # a hook may serve again
        Trainer(engine).fit(batches, 1, hooks=[hook])
    traces = [json.loads(file.read_text()) for file in (tmp_path / "traces").glob("rank_0.*.pt.trace.json")]
    assert len(traces) == 2
    for trace in traces:
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count("ProfilerStep#2") == 1, "the step after the two that are passed over"
        assert names.count("aten::addmm") == 1
    with logged() as messages:
        Trainer(engine).fit(batches[:2], 1, hooks=[hook])
    assert messages == ["ProfileHook kept nothing: it passes over 2 steps, and there were 2"]
    with pytest.raises(ValueError, match="keeps at least 1, got skip=2, warmup=1 and steps=0"):
        hooks.ProfileHook(tmp_path, steps=0)


class Failing(hooks.BaseHook):
    """Fails before the first iteration."""

    def before_train_iter(self, trainer: Trainer) -> None:
        raise ZeroDivisionError


class FakeWriter:
    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.scalars, self.flushed = log_dir, [], False  # type: ignore[var-annotated]

    def add_scalar(self, *args: Any) -> None:
        self.scalars.append(args)

    def flush(self) -> None:
        self.flushed = True


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match="needs the package tensorboard; install it: pip install tensorboard"
    ):
        hooks.TensorboardHook(tmp_path)
    fake = types.SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    hook = hooks.TensorboardHook(str(tmp_path), ranks=[0])
    Trainer(still()).fit(BATCHES, 1, test_dataloader=BATCHES, hooks=[hook, hooks.LossHook()])
    assert hook.writer.log_dir == str(tmp_path / "global_rank_0")
    assert hook.writer.scalars == [("Loss/train", 1.0, 1), ("Loss/train", 2.0, 2), ("Loss/test", 1.5, 2)]
    assert hook.writer.flushed
    assert hooks.TensorboardHook(tmp_path, ranks=[1]).writer is None


def test_checkpoints_resume_a_training(tmp_path: Path) -> None:
    def make() -> tuple[Trainer, Any]:
        model = mlp()
        optimizer = sgd(model.parameters())
        return Trainer(Engine(model, optimizer, nn.CrossEntropyLoss())), StepLR(optimizer, 1, gamma=0.5)

    whole, scheduler = make()
    whole.fit(
        loader(4, 2),
        4,
        hooks=[hooks.LRSchedulerHook(scheduler, True), hooks.SaveCheckpointHook(2, tmp_path / "ckpt")],
    )
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == ["epoch_1.pt", "epoch_3.pt"]

    resumed, scheduler = make()
    engine = resumed.engine
    epoch = load_checkpoint(tmp_path / "ckpt" / "epoch_1.pt", engine.model, engine.optimizer, scheduler)
    assert epoch == 1
    resumed.cur_epoch = epoch + 1
    resumed.fit(loader(4, 2), 4, hooks=[hooks.LRSchedulerHook(scheduler, True)])
    for p, q in zip(engine.model.parameters(), whole.engine.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 / 16)


def test_checkpoints_by_iteration_and_in_one_file(tmp_path: Path) -> None:
    trainer = Trainer(still())
    model = Still()  # the documents pass the model
    one_file = hooks.SaveCheckpointHook(1, tmp_path / "xxx.pt", model)
    trainer.fit(BATCHES, 2, hooks=[hooks.SaveCheckpointHook(3, tmp_path, save_by_iter=True), one_file])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch_1_step_3.pt", "xxx.pt"]
    assert load_checkpoint(tmp_path / "xxx.pt", model) == 1
    with pytest.raises(ValueError, match="SaveCheckpointHook needs checkpoint_dir"):
        hooks.SaveCheckpointHook()
    with pytest.raises(ValueError, match="interval of at least 1, got 0"):
        hooks.SaveCheckpointHook(0, tmp_path)


def test_a_metric_hook_must_say_what_it_measures() -> None:
    class Nothing(hooks.MetricHook):
        name = "Nothing"

    with pytest.raises(TypeError, match=r"Nothing must implement make_metric\(mode\)"):
        Trainer(still()).fit(BATCHES, 1, hooks=[Nothing(0)])


def test_hooks_are_registered() -> None:
    names = "LossHook AccuracyHook ThroughputHook LogMetricByStepHook LogMetricByEpochHook TensorboardHook"
    names += " LogTimingByEpochHook LogMemoryByEpochHook LRSchedulerHook SaveCheckpointHook"
    assert all(HOOKS.get_module(name) is getattr(hooks, name) for name in names.split())


def check_ranks(rank: int, world_size: int, port: int, folder: Path) -> list[str]:
    launch(port, {}, rank, world_size)
    engine, *_ = initialize(model=Still(), criterion=mean)
    attached = [
        hooks.LossHook(),
        hooks.AccuracyHook(Accuracy()),
        hooks.ThroughputHook(),
        hooks.LogMetricByEpochHook(get_dist_logger(), priority=20),
        hooks.SaveCheckpointHook(1, folder),
    ]
    trainer = Trainer(engine)
    with logged() as messages:
        trainer.fit([BATCHES[rank]], 1, hooks=attached, display_progress=True)
    metrics = trainer.states["metrics"]["train"]
    assert metrics["Loss"].get_accumulated_value() == 1.5, "over both ranks"
    assert metrics["Loss"].get_last_step_value() == rank + 1, "on this rank"
    assert metrics["Accuracy"].get_accumulated_value() == 0.75
    assert metrics["Throughput"]._samples == 4
    local = hooks.ThroughputMetric(False, use_local=True)
    local.update(2, 1.0)
    local.synchronize()
    assert local.get_accumulated_value() == 2.0
    return [m for m in messages if m.startswith("[Epoch")]


def test_metrics_are_brought_together_over_ranks(tmp_path: Path) -> None:
    first, second = spawn(check_ranks, 2, folder=tmp_path)
    assert len(first) == 1
    assert first[0].startswith("[Epoch 0 / Train]: Loss = 1.5 | Accuracy = 0.75 | Throughput = ")
    assert second == [], "one rank logs"
    assert [p.name for p in tmp_path.iterdir()] == ["epoch_0.pt"]


def check_accumulation(rank: int, world_size: int, port: int) -> None:
    """A scheduler by iteration, under accumulation, counts steps of the optimizer: 3 in 5 batches by twos."""
    launch(port)
    model = mlp()
    optimizer = sgd(model.parameters())
    engine, train, _, scheduler = initialize(
        {"gradient_accumulation": 2},
        model=model,
        optimizer=optimizer,
        train_dataloader=torch.utils.data.DataLoader(data(10), batch_size=2),
        lr_scheduler=StepLR(optimizer, 1, gamma=0.5),
    )
    Trainer(engine).fit(train, 2, hooks=[hooks.LRSchedulerHook(scheduler, by_epoch=False)])
    assert scheduler.get_last_lr() == [0.1 * 0.5**6]


def test_the_trainer_accumulates() -> None:
    spawn(check_accumulation, 1)
