"""Pipelines through ``initialize``, ``Engine`` and ``Trainer``: features, evaluation, prediction, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.nn.metric import Accuracy
from colossalai.pipeline.stage import Placement, launched_shape
from colossalai.testing import parameterize, spawn
from colossalai.testing.pipelined import cut
from colossalai.trainer import Trainer, hooks
from colossalai.utils import is_no_pp_or_last_stage
from tests.engine.plans import logged
from tests.pipeline.plans import HIDDEN, build, config, launch, problem

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}  # with their chunks


def _serial_name(name: str, chunks: int) -> str:
    """The name in the serial model of a parameter of a stage."""
    return name if chunks == 1 else name.partition(".")[2]


def _engine(settings: dict[str, Any], **parts: Any) -> Any:
    """An engine over this rank's part of ``build()`` in the launched job."""
    gpc.load_config(settings)
    gpc.check_sanity()
    chunks = settings.get("NUM_CHUNKS", 1)
    serial = build()
    assert isinstance(serial, nn.Sequential)
    rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    stages = cut(serial, Placement(gpc.pipeline_parallel_size, chunks, launched_shape()), rank)
    model = parts.pop("model", None) or (stages[0] if chunks == 1 else nn.ModuleList(stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = parts.pop("criterion", nn.CrossEntropyLoss())
    return colossalai.initialize(model, optimizer, criterion, verbose=False, **parts)[0]


@parameterize("schedule", ["1f1b", "zbv"])
def check_trainer(rank: int, world_size: int, port: int, schedule: str) -> None:
    chunks, has_loss = (2, rank == 0) if schedule == "zbv" else (1, rank == 1)
    settings = config(schedule, 2, 4, chunks)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    engine = _engine(settings)
    assert engine.uses_pipeline
    assert type(engine.schedule) is (InterleavedPipelineSchedule if chunks == 2 else PipelineSchedule)
    assert is_no_pp_or_last_stage() is has_loss
    batches = problem().batches
    data = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    trainer = Trainer(engine)
    trainer.fit(
        DataLoader(data, batch_size=16),
        epochs=2,
        hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.ThroughputHook()],
        test_dataloader=DataLoader(data, batch_size=16),
    )
    metrics = trainer.states["metrics"]
    serial = build()
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    for _ in range(2):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(serial(x), y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        correct = sum(int((serial(x).argmax(-1) == y).sum()) for x, y in batches)
        tested = [nn.functional.cross_entropy(serial(x), y).item() for x, y in batches]
    # on every rank, whoever computed them
    assert metrics["train"]["Loss"].get_accumulated_value() == pytest.approx(
        sum(losses) / len(losses), rel=1e-5
    )
    assert metrics["test"]["Loss"].get_accumulated_value() == pytest.approx(
        sum(tested) / len(tested), rel=1e-5
    )
    assert metrics["test"]["Accuracy"].get_accumulated_value() == pytest.approx(correct / len(data))
    assert metrics["train"]["Throughput"].get_accumulated_value() > 0
    last = metrics["train"]["Loss"].get_last_step_value()
    assert last == pytest.approx(losses[-1], rel=1e-5) if has_loss else math.isnan(last)
    # prediction, of a number of samples that micro-batches do not divide
    found = trainer.predict(batches[0][0][:3])
    if has_loss:
        torch.testing.assert_close(found, serial(batches[0][0][:3]).detach())
    else:
        assert found is None


def test_trainer_has_the_metrics_of_serial_training_on_all_ranks() -> None:
    spawn(check_trainer, 2)


@parameterize("schedule", ["gpipe", "interleaved"])
def check_evaluation(rank: int, world_size: int, port: int, schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    settings = config(schedule, 2, 2, chunks)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    engine = _engine(settings)
    assert isinstance(engine.schedule, InterleavedPipelineSchedule) is (chunks == 2)
    engine.eval()
    x, y = problem().batches[0]
    expected = build()(x).detach()
    for wants_loss in (True, False):
        output, label, loss = engine.execute_schedule(
            iter([(x, y)]), forward_only=True, return_loss=wants_loss
        )
        if rank == 0:
            assert (output, label, loss) == (None, None, None)
            continue
        torch.testing.assert_close(output, expected)
        assert torch.equal(label, y)
        if wants_loss:
            torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, y))
        else:
            assert loss is None
    assert all(p.grad is None for p in engine.model.parameters())
    # the last batch of a data loader is of any size
    output, _, loss = engine.execute_schedule(iter([(x[:3], y[:3])]), forward_only=True)
    if rank == 1:
        torch.testing.assert_close(output, expected[:3])
        torch.testing.assert_close(loss, nn.functional.cross_entropy(expected[:3], y[:3]))
    with pytest.raises(ValueError, match="a batch of 3 samples cannot be cut into 2 equal micro-batches"):
        engine.execute_schedule(iter([(x[:3], y[:3])]))
    only_loss = engine.execute_schedule(iter([(x, y)]), forward_only=True, return_output_label=False)
    assert only_loss[:2] == (None, None)
    assert (only_loss[2] is None) is (rank == 0)


def test_evaluation() -> None:
    spawn(check_evaluation, 2)


class ClippedSGD(torch.optim.SGD):
    """What serial training with clipping does."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


@parameterize("schedule", list(SCHEDULES))
def check_clipping(rank: int, world_size: int, port: int, schedule: str) -> None:
    """The norm is that of all stages: the same step as with torch's clipping of the whole model."""
    chunks = SCHEDULES[schedule]
    settings = config(schedule, 2, 4, chunks, clip_grad_norm=0.05)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    engine = _engine(settings)
    serial = build()
    optimizer = ClippedSGD(serial.parameters(), lr=0.1)
    for batch in problem().batches:
        engine.zero_grad()
        engine.execute_schedule(iter([batch]))
        engine.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(serial(batch[0]), batch[1]).backward()
        optimizer.step()
    theirs = dict(serial.named_parameters())
    for name, p in engine.model.named_parameters():
        torch.testing.assert_close(p, theirs[_serial_name(name, chunks)], rtol=1e-5, atol=1e-6)


def test_clipping_takes_the_norm_over_all_stages() -> None:
    spawn(check_clipping, 2)


def check_booster(rank: int, world_size: int, port: int) -> None:
    settings = config("interleaved", 2, 2, 2)
    launch(settings)
    serial = build()
    assert isinstance(serial, nn.Sequential)
    stages = nn.ModuleList(cut(serial, Placement(2, 2), gpc.get_local_rank(ParallelMode.PIPELINE)))
    booster = Booster(device="cpu")
    model, optimizer, criterion, *_ = booster.boost(
        stages, torch.optim.SGD(stages.parameters(), lr=0.1), nn.CrossEntropyLoss()
    )
    own = gpc.get_local_rank(ParallelMode.DATA)
    serial = build()
    reference = torch.optim.SGD(serial.parameters(), lr=0.1)
    for x, y in problem().batches:
        half = x.chunk(2)[own], y.chunk(2)[own]
        with torch.no_grad():
            expected = serial(half[0])
        found = booster.execute_pipeline(iter([half]), model, criterion, optimizer, return_outputs=True)
        optimizer.step()
        optimizer.zero_grad()
        if rank % 2:
            torch.testing.assert_close(found["outputs"], expected)
            torch.testing.assert_close(found["loss"], nn.functional.cross_entropy(expected, half[1]))
        else:
            assert found == {"loss": None, "outputs": None}
        reference.zero_grad()
        nn.functional.cross_entropy(serial(x), y).backward()
        reference.step()
    theirs = dict(serial.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, theirs[name.partition(".")[2]], rtol=1e-5, atol=1e-6)
    evaluated = booster.execute_pipeline(iter([(x, y)]), model, criterion)
    assert (evaluated["loss"] is None) is (rank % 2 == 0)
    with pytest.raises(RuntimeError, match="execute_pipeline has no batch left: the iterator has come to"):
        booster.execute_pipeline(iter([]), model, criterion)
    with pytest.raises(TypeError, match="execute_pipeline takes the next batch of an iterator, got list"):
        booster.execute_pipeline([(x, y)], model, criterion)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"execute_pipeline needs the optimizer that booster\.boost returned, got SGD"
    ):
        booster.execute_pipeline(iter([(x, y)]), model, criterion, reference)


def test_booster_executes_the_same_pipeline() -> None:
    spawn(check_booster, 4)


def test_booster_without_a_pipeline() -> None:
    with pytest.raises(RuntimeError, match="execute_pipeline needs a job with a pipeline; launch with"):
        Booster(device="cpu").execute_pipeline(iter([]), nn.Linear(1, 1), None)


@parameterize("schedule", list(SCHEDULES))
def check_accumulation(rank: int, world_size: int, port: int, schedule: str) -> None:
    chunks = SCHEDULES[schedule]
    settings = config(schedule, 2, 2, chunks, gradient_accumulation=2)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    engine = _engine(settings)
    serial = build()
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    batches = problem().batches[:4]
    for i, batch in enumerate(batches):
        engine.zero_grad()
        engine.execute_schedule(iter([batch]))
        engine.step()
        (nn.functional.cross_entropy(serial(batch[0]), batch[1]) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(serial.named_parameters())
    for name, p in engine.model.named_parameters():
        torch.testing.assert_close(p, theirs[_serial_name(name, chunks)], rtol=1e-5, atol=1e-6)


def test_gradient_accumulation() -> None:
    spawn(check_accumulation, 2)


@parameterize("schedule", list(SCHEDULES))
def check_naive_amp(rank: int, world_size: int, port: int, schedule: str) -> None:
    chunks = SCHEDULES[schedule]
    settings = config(
        schedule, 2, 4, chunks, fp16={"mode": AMP_TYPE.NAIVE, "initial_scale": 64}, TENSOR_SHAPE=(4, HIDDEN)
    )
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    engine = _engine(settings)
    serial = build()
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    for batch in problem().batches:
        engine.zero_grad()
        output, _, loss = engine.execute_schedule(iter([batch]))
        engine.step()
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(serial(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        if loss is not None:
            assert output.dtype is torch.float32
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-3)
    assert not engine.optimizer.step_was_skipped
    theirs = dict(serial.named_parameters())
    for name, p in engine.model.named_parameters():
        assert p.dtype is torch.float16
        torch.testing.assert_close(p.float(), theirs[_serial_name(name, chunks)], rtol=1e-2, atol=2e-3)


def test_naive_amp() -> None:
    spawn(check_naive_amp, 2)


def check_naive_amp_under_a_plugin(rank: int, world_size: int, port: int) -> None:
    """The plugin's wrapper goes around that of the precision; the criterion still gets float32."""
    launch(config("1f1b", 2, 4))
    serial = build()
    assert isinstance(serial, nn.Sequential)
    (stage,) = cut(serial, Placement(2), rank)
    booster = Booster(mixed_precision="fp16_naive", plugin=TorchDDPPlugin(), device="cpu")
    model, optimizer, criterion, *_ = booster.boost(
        stage, torch.optim.SGD(stage.parameters(), lr=0.1), nn.CrossEntropyLoss()
    )
    batch = problem().batches[0]
    found = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_outputs=True)
    if rank == 1:
        assert found["outputs"].dtype is torch.float32
        assert found["loss"].dtype is torch.float32


def test_naive_amp_under_a_plugin() -> None:
    spawn(check_naive_amp_under_a_plugin, 2)


@parameterize("schedule", list(SCHEDULES))
def check_ddp(rank: int, world_size: int, port: int, schedule: str) -> None:
    """DDP around the stages of two replicas: gradients of two calls add up, and are averaged once for all
    micro-batches.
    """
    chunks = SCHEDULES[schedule]
    settings = config(schedule, 2, 2, chunks)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    gpc.check_sanity()
    serial = build()
    assert isinstance(serial, nn.Sequential)
    placement = Placement(2, chunks, launched_shape())
    stages = cut(serial, placement, gpc.get_local_rank(ParallelMode.PIPELINE))
    stage = stages[0] if chunks == 1 else nn.ModuleList(stages)
    booster = Booster(device="cpu", plugin=TorchDDPPlugin())
    model, optimizer, criterion, *_ = booster.boost(
        stage, torch.optim.SGD(stage.parameters(), lr=0.1), nn.CrossEntropyLoss()
    )
    own = gpc.get_local_rank(ParallelMode.DATA)
    serial = build()
    reference = torch.optim.SGD(serial.parameters(), lr=0.1)
    with logged() as messages:
        for i, (x, y) in enumerate(problem().batches[:4]):
            half = x.chunk(2)[own], y.chunk(2)[own]
            booster.execute_pipeline(iter([half]), model, criterion, optimizer)
            nn.functional.cross_entropy(serial(x), y).backward()
            if i % 2:
                for one in (optimizer, reference):
                    one.step()
                    one.zero_grad()
    assert not any("averaged" in message for message in messages)
    theirs = dict(serial.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, theirs[_serial_name(name, chunks)], rtol=1e-5, atol=1e-6)


def test_ddp_around_stages() -> None:
    spawn(check_ddp, 4)
