"""What only a GPU can show: batches move to it, losses are looked at in bundles, timers and memory are those
of the device.
"""

from __future__ import annotations

import pytest
import torch

from colossalai.amp import AMP_TYPE
from colossalai.interface.loss import LOOK_EVERY
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.testing import assert_equal_in_group, spawn
from colossalai.trainer import Trainer, hooks
from tests.engine.plans import initialize, launch, loader, logged, mlp

pytestmark = pytest.mark.gpu

CONFIGS = (
    {},
    {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
    {"fp16": {"mode": AMP_TYPE.TORCH}, "gradient_accumulation": 2, "clip_grad_norm": 1.0},
)


def check_training(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)  # gloo: ranks may share one GPU
    for config in CONFIGS:
        engine, train, test, _ = initialize(
            config, model=mlp(rank), train_dataloader=loader(32, 4), test_dataloader=loader(8, 4)
        )
        trainer = Trainer(engine)
        attached = [
            hooks.LossHook(),
            hooks.AccuracyHook(Accuracy()),
            hooks.ThroughputHook(tflop_per_step=1e-6),
            hooks.LogMemoryByEpochHook(get_dist_logger()),
        ]
        losses = []
        with logged() as messages:
            for _ in range(3):
                trainer.fit(train, 2, test_dataloader=test, hooks=attached)
                losses.append(trainer.states["metrics"]["train"]["Loss"].get_accumulated_value())
        assert losses[-1] < losses[0]
        assert rank != 0 or any("GPU: allocated" in m for m in messages)
        for p in engine.model.parameters():
            assert p.is_cuda
            assert_equal_in_group(p)
        assert trainer.predict(torch.ones(1, 6)).is_cuda


def test_training_on_gpu() -> None:
    spawn(check_training, 2)


def check_nan(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    engine, *_ = initialize()
    batch = (torch.full((2, 6), float("nan")), torch.tensor([0, 1]))
    with logged() as messages:
        for _ in range(LOOK_EVERY - 1):
            engine.execute_schedule(iter([batch]))
        assert messages == [], "reading a loss waits for the device"
        engine.execute_schedule(iter([batch]))
    assert f"(backward passes 1 to {LOOK_EVERY})" in messages[-1]


def test_losses_are_looked_at_in_bundles() -> None:
    spawn(check_nan, 1)
