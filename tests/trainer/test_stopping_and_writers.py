"""Early stopping, and writers of metrics for the trainer and for a script's own loop."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.engine import Engine
from colossalai.logging import JSONLinesWriter, TensorboardWriter, WandbWriter
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from tests.engine.plans import launch, logged

X = torch.ones(1, 1)


class Given(nn.Module):
    """A model whose loss in each evaluation is given beforehand."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses = iter(losses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 * self.weight + (1.0 if self.training else next(self.losses))


def engine(losses: list[float]) -> Engine:
    model = Given(losses)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out, _: out.mean())


BATCH = [(X, torch.zeros(1))]


@pytest.mark.parametrize(
    ("losses", "options", "tests"),
    [
        ([3.0, 2.0, 2.5, 2.5, 1.0], {"patience": 2}, 4),
        ([3.0, 2.0, 1.9, 1.8, 1.7], {"patience": 1, "min_delta": 0.15}, 3),
        ([float("nan"), float("nan"), 1.0], {"patience": 2}, 2),
        ([1.0, 2.0, 3.0, 3.0, 9.0], {"patience": 1, "higher_is_better": True}, 4),
        ([3.0, 2.0, 1.0], {"patience": 1}, 3),
    ],
)
def test_training_ends_when_nothing_becomes_better(
    losses: list[float], options: dict[str, Any], tests: int
) -> None:
    trainer = Trainer(engine(losses))
    early = hooks.EarlyStoppingHook(**options)
    with logged() as lines:
        trainer.fit(BATCH, len(losses), test_dataloader=BATCH, hooks=[hooks.LossHook(), early])
    assert trainer.cur_epoch + 1 == tests
    said = any("Training is stopped: Loss (test)" in line for line in lines)
    assert said == (tests < len(losses) or early._without >= early.patience)
    trainer.engine.model.losses = iter(losses)  # type: ignore[union-attr,assignment]
    trainer.fit(BATCH, 1, test_dataloader=BATCH, hooks=[hooks.LossHook(), early])  # a new fit is a new one
    assert trainer.cur_epoch == 0


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="needs patience of at least 1, got 0"):
        hooks.EarlyStoppingHook(patience=0)
    with pytest.raises(ValueError, match="mode is 'train' or 'test', got 'eval'"):
        hooks.EarlyStoppingHook(mode="eval")
    with pytest.raises(ValueError, match=r"watches 'Loss', which no hook measures.*there are: none"):
        Trainer(engine([])).fit(BATCH, 1, hooks=[hooks.EarlyStoppingHook()])
    with logged() as lines:
        Trainer(engine([])).fit(BATCH, 1, hooks=[hooks.LossHook(), hooks.EarlyStoppingHook()])
    assert any("has seen no test epoch" in line for line in lines)
    with pytest.raises(TypeError, match=r"needs a writer with a method log\(values, step\)"):
        hooks.WriteMetricsHook(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="for a hook of a fit that runs"):
        Trainer(engine([])).stop_training("now")


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "metrics.jsonl"
    for epochs in (1, 2):  # the second run appends
        trainer = Trainer(engine([2.0, float("nan")]))
        trainer.fit(BATCH, epochs, test_dataloader=BATCH, hooks=[hooks.LossHook(), hooks.JSONLinesHook(file)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time"} for line in lines[-4:]] == [
        {"step": 1, "Loss/train": 1.0},
        {"step": 1, "Loss/test": 2.0},
        {"step": 2, "Loss/train": 1.0},
        {"step": 2, "Loss/test": "nan"},
    ]
    assert len(lines) == 6
    with JSONLinesWriter(file) as writer:  # a script of its own
        writer.log({"loss": torch.tensor(0.5)}, step=7)
    assert json.loads(file.read_text().splitlines()[-1])["loss"] == 0.5


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbWriter(project="p")
    monkeypatch.setattr("colossalai.trainer.hooks.log_hooks._writes_here", lambda: False)
    with pytest.raises(ImportError, match="pip install wandb"):  # also where another rank would write
        hooks.WandbHook(project="p")
    monkeypatch.undo()
    sent: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: sent.append((values, step)), finish=lambda: sent.append("finish")
    )
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: sent.append(options) or run)
    )
    hook = hooks.WandbHook(project="p")
    Trainer(engine([2.0])).fit(BATCH, 1, test_dataloader=BATCH, hooks=[hooks.LossHook(), hook])
    assert hook.metric_writer is not None
    hook.metric_writer.close()
    assert sent == [{"project": "p"}, ({"Loss/train": 1.0}, 1), ({"Loss/test": 2.0}, 1), "finish"]


def test_tensorboard_writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorboardWriter(tmp_path)


def _ranks(rank: int, world_size: int, port: int, file: str) -> None:
    launch(port, rank=rank, world_size=world_size)
    trainer = Trainer(engine([3.0, 3.0 + rank, 1.0]))  # ranks that decided by their own losses would part
    trainer.fit(
        BATCH,
        3,
        test_dataloader=BATCH,
        hooks=[hooks.LossHook(), hooks.EarlyStoppingHook(patience=1), hooks.JSONLinesHook(file)],
    )
    assert trainer.cur_epoch == 1


def test_ranks_stop_together_and_one_writes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    spawn(_ranks, 2, file=str(file))
    assert len(file.read_text().splitlines()) == 4
