"""Checkpoints of runs on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchFSDPPlugin
from colossalai.checkpoint_io import byte_io
from colossalai.testing import spawn

pytestmark = pytest.mark.gpu


def _job(device: str, seed: int, **booster: Any) -> tuple[Booster, nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)).to(device)
    boost = Booster(device, **booster)
    boosted = boost.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return boost, boosted.model, boosted.optimizer


def _train(booster: Booster, model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    device = next(model.parameters()).device
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 64, device=device)).float().square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("background", [False, True])
def test_a_run_on_cuda_goes_on_exactly(tmp_path: Path, background: bool) -> None:
    first = _job("cuda", 0, mixed_precision="fp16")
    _train(*first, 3)
    save = first[0].save(tmp_path / "c", background=background)
    expected = _train(*first, 3)
    save.wait()
    if background:
        assert first[0]._runs.writer._buffer.is_pinned()  # type: ignore[union-attr]
    second = _job("cuda", 1, mixed_precision="fp16")
    second[0].load(tmp_path / "c")
    assert _train(*second, 3) == expected


def test_the_cpu_reads_what_cuda_wrote(tmp_path: Path) -> None:
    first = _job("cuda", 0)
    _train(*first, 2)
    first[0].save(tmp_path / "c")
    second = _job("cpu", 1)
    second[0].load(tmp_path / "c")
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a.cpu(), b)
    assert all(state["step"].device.type == "cpu" for state in second[2].state.values())


PLUGINS = {"fsdp": TorchFSDPPlugin, "zero": LowLevelZeroPlugin}


def _ranks(rank: int, world_size: int, port: int, plugin: str, folder: Path) -> list[float]:
    backend = "gloo" if world_size > 1 else None  # ranks that share a GPU
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend=backend, verbose=False)
    torch.manual_seed(0)
    job = _job("cuda", 0, plugin=PLUGINS[plugin]())
    _train(*job, 2)
    job[0].save(folder / "c", background=True).wait()
    expected = _train(*job, 2)
    other = _job("cuda", 0, plugin=PLUGINS[plugin]())
    other[0].load(folder / "c")
    assert _train(*other, 2) == expected
    other[0].save_model(other[1], folder / "model", shard=True, use_safetensors=True)
    other[0].save_optimizer(other[2], folder / "optimizer")
    other[0].load_optimizer(other[2], folder / "optimizer")
    return expected


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_cut_runs_on_cuda(tmp_path: Path, plugin: str, world_size: int) -> None:
    spawn(_ranks, world_size, plugin=plugin, folder=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [1, 12, 13, 1000])
def test_strips_between_cuda_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(byte_io, "STRIP", 48)
    monkeypatch.setattr(byte_io, "_rooms", type(byte_io._rooms)())
    tensor = (torch.randn(count) * 100).to(dtype).cuda()
    raw = b"".join(bytes(strip) for strip in byte_io.strips_of(tensor))
    assert raw == tensor.cpu().view(torch.uint8).numpy().tobytes()
    (tmp_path / "x").write_bytes(b"12345678" + raw)
    room = torch.zeros_like(tensor)
    with (tmp_path / "x").open("rb") as file:
        byte_io.read_into(file.fileno(), 8, room)
    assert torch.equal(room, tensor)


def test_a_save_and_a_load_need_little_memory(tmp_path: Path) -> None:
    """Strips, not whole tensors: on the GPU nothing, beyond the states that a load puts in place."""
    model = nn.Linear(4096, 4096, device="cuda")
    booster = Booster("cuda")
    booster.boost(model)
    whole = model.weight.nbytes
    for act in (booster.save, booster.load):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act(tmp_path / "c")
        assert torch.cuda.max_memory_allocated() - before < whole / 4
