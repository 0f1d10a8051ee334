"""Every mixed precision that a config can name, with all other features at once, on two ranks."""

from __future__ import annotations

import torch

from colossalai.amp import AMP_TYPE
from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.engine.features import PRECISION_OF
from colossalai.testing import assert_equal_in_group, spawn
from tests.engine.plans import initialize, launch, loader, mlp, on_device

OPTIONS = {AMP_TYPE.NAIVE: {"initial_scale": 2.0**8}}
HANDLERS = [{"type": "DataParallelGradientHandler"}]


def check_modes(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    for mode in (mode for mode, name in PRECISION_OF.items() if name in PRECISIONS):
        for handlers in ([], HANDLERS):
            config = {
                "fp16": {"mode": mode, **OPTIONS.get(mode, {})},
                "gradient_accumulation": 2,
                "clip_grad_norm": 0.1,
                "gradient_handler": handlers,
            }
            engine, batches, *_ = initialize(config, train_dataloader=loader(20, 2), model=mlp(rank))
            before = [p.detach().clone() for p in engine.model.parameters()]
            for x, y in (on_device(*batch) for batch in batches):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x + rank), y))  # type: ignore[misc]
                engine.step()
            for p, q in zip(engine.model.parameters(), before, strict=True):
                assert_equal_in_group(p)  # fails if masters of the ranks differ, or a rank skips a step alone
                assert not torch.equal(p, q), f"{mode} does not train"


def check_without_a_mode(rank: int, world_size: int, port: int) -> None:
    """The config of a switched-off mixed precision trains as one without the section."""
    launch(port, {}, rank, world_size)
    trained = []
    for config in ({"fp16": {"mode": None, "initial_scale": 2.0**8}}, {}):
        engine, batches, *_ = initialize(config, train_dataloader=loader(20, 2), model=mlp(rank))
        for x, y in (on_device(*batch) for batch in batches):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x + rank), y))  # type: ignore[misc]
            engine.step()
        trained.append(list(engine.model.parameters()))
    for p, q in zip(*trained, strict=True):
        assert p.dtype is torch.float32
        assert torch.equal(p, q)


def test_no_mode_is_no_mixed_precision() -> None:
    spawn(check_without_a_mode, 2)


def test_every_mode_trains_and_keeps_the_replicas_alike() -> None:
    spawn(check_modes, 2)
