"""The config section ``zero`` where it means Gemini."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.context.config import ConfigException
from colossalai.engine.gemini_section import read_gemini
from colossalai.engine.zero_section import check_zero
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from colossalai.zero import BucketTensorShardStrategy, TensorShardStrategy
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from tests.engine.plans import initialize, launch, loader, mlp, on_device

DOCUMENTED = {
    "model_config": {
        "tensor_placement_policy": "auto",
        "shard_strategy": TensorShardStrategy(),
        "reuse_fp16_shard": True,
    },
    "optimizer_config": {"gpu_margin_mem_ratio": 0.8, "initial_scale": 2**14, "clipping_norm": 1.0},
}
NVME = {"device": "nvme", "nvme_path": "/fast"}


def test_three_ways_of_writing() -> None:
    expected = {
        "placement_policy": "auto",
        "gpu_margin_mem_ratio": 0.8,
        "initial_scale": 2**14,
        "max_norm": 1.0,
    }
    assert read_gemini(DOCUMENTED).options == expected
    assert read_gemini({"level": 3, **expected}).options == expected
    assert read_gemini({"level": 3, "clip_grad": 1.0, "cpu_offload": True, "overlap_comm": True}).options == {
        "max_norm": 1.0,
        "placement_policy": "cpu",
    }
    fixed = read_gemini({"level": 3, "dynamic_loss_scale": False, "initial_scale": 8}).options
    assert fixed == {"initial_scale": 8, "min_scale": 8, "max_scale": 8}
    offload = {"level": 3, "offload_optimizer_config": NVME, "offload_param_config": {"device": "cpu"}}
    assert read_gemini({**offload, "aio_config": {"block_size": 2**20}}) == (
        {"placement_policy": "cpu"},
        "/fast",
    )
    assert read_gemini({"level": 3, "offload_optimizer_config": {"device": "none"}}) == ({}, None)
    assert repr(BucketTensorShardStrategy()) == "BucketTensorShardStrategy()"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"level": 3, "policy": 1},
        r"'zero' does not know 'policy'; it takes level, .*model_config, .*placement_policy",
    ),
    (
        {"model_config": {"offload": 1}},
        r"'zero.model_config' does not know 'offload'; it takes tensor_placement_policy",
    ),
    (
        {"optimizer_config": {"lr": 1}},
        r"'zero.optimizer_config' does not know 'lr'; it takes .*gpu_margin_mem_ratio",
    ),
    (
        {"level": 3, "aio_config": {"depth": 1}},
        r"'zero.aio_config' does not know 'depth'; it takes block_size",
    ),
    ({"level": 3, "offload_param_config": {"x": 1}}, r"'zero.offload_param_config' does not know 'x'"),
    (
        {"level": 3, "offload_optimizer_config": {"x": 1}},
        r"'zero.offload_optimizer_config' does not know 'x'",
    ),
    ({"model_config": "cpu"}, r"needs model_config as a dict, got 'cpu'"),
    (
        {"level": 3, "initial_scale": 2, "optimizer_config": {"initial_scale": 4}},
        r"has initial_scale twice, as 2 and as initial_scale=4",
    ),
    (
        {"level": 3, "cpu_offload": True, "placement_policy": "cuda"},
        r"which is placement policy 'cpu', and also asks for 'cuda'",
    ),
    ({"level": 3, "offload_optimizer_config": {"device": "disk"}}, r"'none', 'cpu' or 'nvme', got 'disk'"),
    ({"level": 3, "offload_optimizer_config": {"device": "nvme"}}, r"needs nvme_path, a folder"),
    ({"level": 3, "offload_param_config": NVME}, r"only optimizer states go to a disk: write device='cpu'"),
]


@pytest.mark.parametrize(("section", "message"), REFUSED)
def test_what_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        check_zero(section)


def check_engine(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(port, {}, rank, world_size)
    engine, *_ = initialize({"zero": DOCUMENTED})
    assert isinstance(engine.model, GeminiDDP)
    assert isinstance(engine.optimizer, GeminiOptimizer)
    assert engine.optimizer.loss_scale == 2**14
    assert engine.model.gemini_manager.policy_name == "auto"
    assert next(engine.model.parameters()).dtype == torch.float16
    with pytest.raises(ConfigException, match=r"section 'zero': there is no placement policy 'gpu'"):
        initialize({"zero": {"level": 3, "placement_policy": "gpu"}})

    # no communication before the last pass of a group
    plain = {"zero": {"level": 3, "precision": "fp32"}, "gradient_accumulation": 2}
    engine, *_ = initialize(plain)
    assert isinstance(engine.model, GeminiDDP)
    chunks, reduced = engine.model.chunk_manager, []
    reduce = chunks.reduce_chunk
    chunks.reduce_chunk = lambda *args: reduced.append(args) or reduce(*args)  # type: ignore[method-assign,func-returns-value]
    for i in range(2):
        engine.execute_schedule(iter([on_device(torch.ones(2, 6), torch.tensor([0, 1]))]))
        assert bool(reduced) == (i == 1)
        engine.step()

    # a trainer with clipping, and states on a disk
    model = mlp()
    section = {"level": 3, "precision": "fp32", "offload_optimizer_config": {"nvme_path": str(folder)}}
    engine, train, _, _ = initialize(
        {"zero": section, "clip_grad_norm": 1.0},
        model=model,
        optimizer=HybridAdam(model.parameters(), lr=1e-2),
        train_dataloader=loader(16, 4),
    )
    Trainer(engine).fit(train, epochs=1, hooks=[hooks.LossHook()])
    engine.model.settle()
    shelf, trained = engine.model.chunk_manager.shelf, sum(p.numel() for p in model.parameters())
    assert shelf is not None
    assert shelf.tier.used >= 2 * 4 * trained / world_size  # both moments
    with pytest.raises(ConfigException, match=r"which CPUAdam and HybridAdam can do, got SGD"):
        initialize({"zero": section})


def test_in_an_engine(tmp_path: Path) -> None:
    spawn(check_engine, 2, folder=tmp_path)
