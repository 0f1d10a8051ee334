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
NORM = 0.8
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
    weights = {"level": 3, "host_capacity": 2**30, "offload_param_config": NVME}
    expected = {"placement_policy": "cpu", "host_capacity": 2**30, "disk_dir": "/fast"}
    assert read_gemini(weights) == (expected, None)
    assert read_gemini({**weights, "offload_optimizer_config": NVME}) == (expected, None)
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
    (
        {"level": 3, "offload_param_config": NVME},
        r"needs two things: nvme_path there, .* and host_capacity in 'zero', the bytes",
    ),
    (
        {"level": 3, "host_capacity": 1, "offload_param_config": {"device": "nvme"}},
        r"offload_param_config with device='nvme' and needs two things: nvme_path there",
    ),
    (
        {
            "level": 3,
            "host_capacity": 1,
            "offload_param_config": NVME,
            "offload_optimizer_config": {"nvme_path": "/slow"},
        },
        r"with nvme_path='/fast', which takes optimizer states too, and '/slow' beside it; name one folder",
    ),
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
    # the disk as third tier: what goes beyond the host
    capacity = 20_000
    section = {**section, "offload_param_config": {"nvme_path": str(folder)}, "host_capacity": capacity}
    model = mlp()
    inner = HybridAdam(model.parameters(), lr=1e-2)
    engine, train, _, _ = initialize(
        {"zero": section}, model=model, optimizer=inner, train_dataloader=loader(16, 4)
    )
    Trainer(engine).fit(train, epochs=1)
    engine.model.settle()
    tiers = engine.model.chunk_manager.tiers
    assert [tier.name for tier in tiers] == ["compute", "host", "disk"]
    assert 0 < tiers[1].peak <= tiers[1].limit == capacity
    with pytest.raises(ConfigException, match=r"which CPUAdam and HybridAdam can do, got SGD"):
        initialize({"zero": {"level": 3, "offload_optimizer_config": {"nvme_path": str(folder)}}})


def check_clipping(rank: int, world_size: int, port: int) -> None:
    """The norm of a config is known to updates in the backward pass, and clips as it does without these."""
    launch(port, rank=rank, world_size=world_size)
    chunk = 64 * 4 / 2**20
    section = {
        "level": 3,
        "placement_policy": "cpu",
        "precision": "bf16",
        "min_chunk_size_mb": chunk,
        "search_range_mb": chunk,
    }
    weights, tried, norms = [], {False: 0, True: 0}, []
    for early in (False, True):
        model = mlp()
        engine, train, _, _ = initialize(
            {"zero": {**section, "update_in_backward": early, "undo_ratio": 1.0}, "clip_grad_norm": NORM},
            model=model,
            optimizer=HybridAdam(model.parameters(), lr=1e-2),
            train_dataloader=loader(64, 4),
        )
        manager = engine.model.gemini_manager
        for x, y in train:
            engine.zero_grad()
            x, y = on_device(x, y)
            engine.backward(engine.criterion(engine(x), y))
            manager.worker.wait_all()  # so that updates on trial have been made
            engine.step()
            tried[early] += [event.kind for event in manager.timeline.events].count("try")
            norms.append(engine.optimizer.grad_norm)
        weights.append(engine.model.state_dict(only_rank_0=False))
    assert tried[False] == 0 < tried[True]
    bad = [bool(norm > NORM) for norm in norms if norm is not None]
    assert any(bad)
    assert not all(bad)
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    twice = {**section, "update_in_backward": True, "clip_grad": 1.0}
    with pytest.raises(
        ConfigException, match=r"clip_grad_norm=0\.8, and its section 'zero' has 1\.0 .*; keep one"
    ):
        initialize({"zero": twice, "clip_grad_norm": NORM})
    other = {**section, "update_in_backward": True, "norm_type": float("inf")}
    with pytest.raises(
        ConfigException, match=r"a 2-norm, and its section 'zero' norm_type=inf; give the norm as"
    ):
        initialize({"zero": other, "clip_grad_norm": NORM})
    with pytest.raises(ConfigException, match=r"'zero': undo_ratio is a share from 0 to 1, got 'all'"):
        initialize({"zero": {**section, "undo_ratio": "all"}})


def test_clipping_of_updates_in_the_backward_pass() -> None:
    spawn(check_clipping, 2)


def test_in_an_engine(tmp_path: Path) -> None:
    spawn(check_engine, 2, folder=tmp_path)
