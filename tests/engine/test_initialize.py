"""``colossalai.initialize``: what it makes of a config, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster.mixed_precision import PRECISIONS, FP16TorchMixedPrecision
from colossalai.booster.plugin.ddp import TorchDDPModel
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.engine.features import PRECISION_OF, Features
from colossalai.engine.gradient_accumulation import GradAccumDataloader, GradAccumOptimizer
from colossalai.testing import assert_equal_in_group, spawn
from tests.amp.page_38 import DOCUMENTED
from tests.engine.plans import initialize, launch, loader, logged, mlp, sgd, use_config

TORCH_AMP = {"mode": AMP_TYPE.TORCH, "init_scale": 2.0**8, "growth_interval": 10, "enabled": True}


def check_one_rank(rank: int, world_size: int, port: int) -> None:
    launch(port)
    train, test = loader(8, 2), loader(4, 2)
    engine, own_train, own_test, scheduler = initialize(train_dataloader=train, test_dataloader=test)
    assert own_train is train
    assert own_test is test
    assert scheduler is None
    assert not isinstance(engine.model, TorchDDPModel), "one replica has nothing to average"
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark

    config = {"cudnn_benchmark": True, "cudnn_deterministic": False, "gradient_accumulation": 2}
    engine, own_train, *_ = initialize({**config, "fp16": TORCH_AMP}, train_dataloader=train)
    assert isinstance(engine.optimizer, GradAccumOptimizer)
    assert isinstance(own_train, GradAccumDataloader)
    assert type(engine.optimizer.optim).__name__ == "TorchAMPOptimizer"
    assert engine.optimizer.optim.scaler.get_scale() == 2.0**8
    assert not torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.benchmark

    for name in ("train_dataloader", "test_dataloader"):
        with pytest.raises(TypeError, match=f"needs {name} as a data loader or .* got 5"):
            initialize(**{name: 5})
    with pytest.raises(TypeError, match=r"needs lr_scheduler as .*, with a step\(\), got 'x'"):
        initialize(lr_scheduler="x")

    use_config({"fp16": {"mode": "torch"}})
    engine, *_ = colossalai.initialize(mlp, sgd, nn.CrossEntropyLoss())
    engine.execute_schedule(iter(train))
    engine.step()


def test_features_of_a_config() -> None:
    spawn(check_one_rank, 1)


def check_ddp(rank: int, world_size: int, port: int) -> None:
    launch(port, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, rank, world_size)
    engine, *_ = initialize({**gpc.config, "torch_ddp": {"broadcast_buffers": False}}, model=mlp(rank))
    assert isinstance(engine.model, TorchDDPModel)
    group = engine.model.module.process_group
    assert torch.distributed.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
    for p in engine.model.parameters():
        assert_equal_in_group(p, group)
    first = next(engine.model.parameters())
    whole = [torch.empty_like(first) for _ in range(4)]
    torch.distributed.all_gather(whole, first.detach())
    assert not torch.equal(whole[0], whole[1]), "tensor-parallel ranks keep their own"
    frozen, *_ = initialize({**gpc.config}, model=mlp(rank).requires_grad_(False))
    assert_equal_in_group(next(frozen.model.parameters()), group)


def test_ddp_joins_the_data_parallel_ranks_only() -> None:
    spawn(check_ddp, 4)


def check_handlers(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    model = nn.Sequential(mlp(rank), nn.BatchNorm1d(3))
    model[1].running_mean += rank  # type: ignore[operator]
    engine, *_ = initialize({"gradient_handler": [{"type": "DataParallelGradientHandler"}]}, model=model)
    assert not isinstance(engine.model, TorchDDPModel), "handlers take the place of DDP"
    for tensor in engine.model.state_dict().values():
        assert_equal_in_group(tensor)


def test_with_handlers_replicas_start_alike_without_ddp() -> None:
    spawn(check_handlers, 2)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fp16": {"mode": AMP_TYPE.TORCH}, "zero": {"level": 3}}, ConfigException, "both 'fp16' and 'zero'"),
    (
        {"zero": {"level": 4}},
        ConfigException,
        "needs level=1, level=2 or level=3, or model_config, got level=4",
    ),
    (
        {"zero": {"stage": 2}},
        ConfigException,
        r"'zero' does not know 'stage' \(level=2 is what the plugin calls stage\); it takes level",
    ),
    ({"zero": {"lvl": 2}}, ConfigException, "'zero' does not know 'lvl'; it takes level"),
    ({"zero": {"placement_policy": "cpu"}}, ConfigException, r"needs level=1, .* got level=None"),
    (
        {"zero": {"level": 2, "overlap": True}},
        ConfigException,
        "'zero' does not know 'overlap'; it takes level",
    ),
    (
        {"zero": {"level": 1}, "torch_ddp": {"bucket_cap_mb": 1}},
        ConfigException,
        "both 'torch_ddp' and 'zero'",
    ),
    (
        {"zero": {"level": 1}, "gradient_handler": [{"type": "DataParallelGradientHandler"}]},
        ConfigException,
        "averages gradients itself",
    ),
    ({"fp16": {}}, ConfigException, "section 'fp16' needs a mode"),
    ({"fp16": {"mode": "bf16"}}, ConfigException, r"one of AMP_TYPE.APEX, .* got 'bf16'"),
    (
        {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": -1}},
        ConfigException,
        "'fp16' with mode AMP_TYPE.NAIVE: .* needs a finite initial_scale above 0, got -1",
    ),
    (
        {"fp16": {"mode": AMP_TYPE.TORCH, "scale": 1}},
        ConfigException,
        "'fp16' with mode AMP_TYPE.TORCH: .*unexpected keyword argument 'scale'",
    ),
    ({"gradient_handler": [{"type": "NoHandler"}]}, ValueError, "has no 'NoHandler'"),
]


@pytest.mark.parametrize(("config", "kind", "message"), REFUSED[:-1])
def test_configs_that_are_refused(config: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Features.from_config(config)


def test_precision_by_its_section() -> None:
    precision = Features.from_config({"fp16": TORCH_AMP}).precision
    assert isinstance(precision, FP16TorchMixedPrecision)
    assert Features.from_config({"fp16": {**TORCH_AMP, "enabled": False}}).precision is None
    assert Features.from_config({}).precision is None


def test_without_a_mode_there_is_no_mixed_precision() -> None:
    off = {"mode": None, "initial_scale": 4}  # a switch in a config leaves the other options
    assert Features.from_config({"fp16": off}).precision is None
    assert Features.from_config({"fp16": off, "zero": {"level": 2}}).zero == {"level": 2}
    with pytest.raises(ConfigException, match="or None for no mixed precision, got 'fp8'"):
        Features.from_config({"fp16": {"mode": "fp8"}})


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_the_options_of_the_documents_are_accepted(mode: AMP_TYPE) -> None:
    precision = Features.from_config({"fp16": {"mode": mode, **DOCUMENTED[mode]}}).precision
    assert type(precision) is PRECISIONS[PRECISION_OF[mode]]


def _raises(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    config, kind, message = REFUSED[-1]
    _raises(kind, message, lambda: initialize(config))
    _raises(ValueError, "train_dataloader is empty: it has no batch", lambda: initialize(train_dataloader=[]))
    _raises(ValueError, "test_dataloader is empty", lambda: initialize(test_dataloader=[]))
    _raises(TypeError, "needs a model, or a function .* got 3", lambda: colossalai.initialize(3, sgd))  # type: ignore[arg-type]
    _raises(TypeError, "needs an optimizer, .* got None", lambda: colossalai.initialize(mlp(), None))  # type: ignore[arg-type]
    _raises(
        TypeError,
        "colossalai.initialize needs an optimizer, .* got 'sgd'",
        lambda: initialize(optimizer="sgd"),
    )
    unknown = {"torch_ddp": {"bucket": 1}}
    _raises(
        ConfigException, "'torch_ddp': .*unexpected keyword argument 'bucket'", lambda: initialize(unknown)
    )


def test_what_initialize_refuses() -> None:
    spawn(check_refusals, 2)


def test_initialize_needs_a_launch() -> None:
    with pytest.raises(RuntimeError, match=r"needs a launched job; call colossalai\.launch_from_torch"):
        colossalai.initialize(mlp, sgd)


def check_log(rank: int, world_size: int, port: int) -> list[str]:
    launch(port, {"BATCH_SIZE": 4, "torch_ddp": {"static_graph": True}}, rank, world_size)
    with logged() as messages:
        colossalai.initialize(mlp, sgd)
    return messages


def test_documented_log_lines() -> None:
    text = "\n".join(spawn(check_log, 1)[0])
    assert "========== Your Config ========" in text
    assert "'BATCH_SIZE': 4" in text
    assert "cuDNN benchmark = False, deterministic = True" in text
    assert "'torch_ddp' has no effect: there is one replica" in text
