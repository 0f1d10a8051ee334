"""The loss scale is part of an optimizer's checkpoint: a resumed run is the undisturbed one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.amp.tools import batch, mlp
from tests.engine.plans import launch

# scales that grow and back off within few steps
PRECISIONS: dict[str, Any] = {
    "torch": lambda: FP16TorchMixedPrecision(init_scale=2.0**8, growth_interval=3),
    "naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**8, growth_interval=3),
    "apex O1": lambda: FP16ApexMixedPrecision("O1", verbosity=0),
    "apex O2": lambda: FP16ApexMixedPrecision("O2", verbosity=0),
}
MODES = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
STEPS = 16
OVERFLOWS = (1, 4, 5, 9)


class Run:
    """A training run that overflows in some of its steps."""

    def __init__(self, precision: MixedPrecision | str, plugin: Any = None) -> None:
        model = mlp()
        raw = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = CosineAnnealingWarmupLR(raw, total_steps=STEPS, warmup_steps=3)
        self.booster = Booster(device="cpu", mixed_precision=precision, plugin=plugin)
        self.model, self.optimizer, _, _, scheduler = self.booster.boost(model, raw, lr_scheduler=scheduler)  # type: ignore[assignment]
        self.scheduler: Any = scheduler

    def train(self, steps: range) -> list[float]:
        seen = []
        for step in steps:
            x, y = batch(step)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x).float(), y)
            self.optimizer.backward(loss * (float("inf") if step in OVERFLOWS else 1.0))
            self.optimizer.clip_grad_by_norm(0.5)
            self.optimizer.step()
            self.scheduler.step()
            seen += [loss.item(), self.optimizer.loss_scale, self.scheduler.get_last_lr()[0]]
        return seen

    def tensors(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.optimizer.parameters()]


def _save(run: Run, folder: Path, how: str) -> None:
    if how == "one file":
        save_checkpoint(folder / "all.pt", 0, run.model, run.optimizer, run.scheduler)
        return
    run.booster.save_model(run.model, folder / "model", shard=how == "shards")
    run.booster.save_optimizer(
        run.optimizer, folder / "optimizer", shard=how == "shards", size_per_shard=1e-3
    )
    run.booster.save_lr_scheduler(run.scheduler, folder / "scheduler")


def _load(run: Run, folder: Path, how: str) -> None:
    if how == "one file":
        load_checkpoint(folder / "all.pt", run.model, run.optimizer, run.scheduler)
        return
    run.booster.load_model(run.model, folder / "model")
    run.booster.load_optimizer(run.optimizer, folder / "optimizer")
    run.booster.load_lr_scheduler(run.scheduler, folder / "scheduler")


@MODES
# saved before an overflow, between two, and between good steps
@pytest.mark.parametrize(("how", "saved"), [("file", 4), ("shards", 5), ("one file", 8)])
def test_a_resumed_run_is_the_undisturbed_one(precision: Any, how: str, saved: int, tmp_path: Path) -> None:
    whole = Run(precision())
    whole.train(range(saved))
    _save(whole, tmp_path, how)
    expected = whole.train(range(saved, STEPS))
    resumed = Run(precision())
    _load(resumed, tmp_path, how)
    assert resumed.train(range(saved, STEPS)) == expected
    assert len(set(expected[1::3])) > 1, "the scale does not change in this test"
    for a, b in zip(resumed.tensors(), whole.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", list(PRECISIONS.values())[:2], ids=list(PRECISIONS)[:2])
def test_without_the_loss_scale_a_run_is_another_one_and_a_warning_says_so(precision: Any) -> None:
    whole = Run(precision())
    whole.train(range(6))
    state = whole.optimizer.state_dict()
    assert state.pop("grad_scaler")
    resumed = Run(precision())
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.scheduler.load_state_dict(whole.scheduler.state_dict())
    with pytest.warns(UserWarning, match=r"holds no loss scale \(.*\); training goes on with the scale 256$"):
        resumed.optimizer.load_state_dict(state)
    assert resumed.train(range(6, STEPS)) != whole.train(range(6, STEPS))


def test_a_disabled_scaler_has_nothing_to_save(recwarn: pytest.WarningsRecorder) -> None:
    from colossalai.amp.torch_amp import TorchAMPOptimizer

    def make() -> TorchAMPOptimizer:
        return TorchAMPOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), enabled=False)

    make().load_state_dict(make().state_dict())
    assert not recwarn


def _fsdp(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(port, {}, rank, world_size)
    precision = PRECISIONS["torch"]
    whole = Run(precision(), TorchFSDPPlugin())
    whole.train(range(5))
    _save(whole, folder, "shards")
    expected = whole.train(range(5, STEPS))
    resumed = Run(precision(), TorchFSDPPlugin())
    _load(resumed, folder, "shards")
    assert resumed.train(range(5, STEPS)) == expected


def test_the_same_under_fsdp(tmp_path: Path) -> None:
    spawn(_fsdp, 2, folder=tmp_path)
