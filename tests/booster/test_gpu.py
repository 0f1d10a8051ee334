"""On CUDA: one rank with NCCL, and several ranks with gloo on one GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import DPPluginBase, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.testing import spawn
from colossalai.testing.boosted import whole_tensor
from tests.booster.plans import batches, mlp

pytestmark = pytest.mark.gpu


def _train(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    folder: Path,
    plugin: type[DPPluginBase],
    options: dict[str, Any],
) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    for precision in (None, "bf16") if options.get("cpu_offload") else (None, "fp16", "bf16"):
        torch.manual_seed(0)
        model = mlp()
        serial = copy.deepcopy(model).cuda()
        raw = torch.optim.AdamW(model.parameters(), lr=0.01)
        serial_raw = torch.optim.AdamW(serial.parameters(), lr=0.01)
        booster = Booster(mixed_precision=precision, plugin=plugin(**options))
        boosted, optimizer, criterion, *_ = booster.boost(model, raw, nn.CrossEntropyLoss())
        serial_booster = Booster(mixed_precision=precision)
        serial_boosted, serial_optimizer, *_ = serial_booster.boost(serial, serial_raw)
        offloaded = bool(options.get("cpu_offload"))
        assert next(boosted.parameters()).device.type == ("cpu" if offloaded else "cuda")
        assert criterion is not None
        own = slice(rank, None, world_size)
        for x, y in batches((16, 16, 8)):
            x, y = x.cuda(), y.cuda()
            for b, m, o, part in (
                (booster, boosted, optimizer, own),
                (serial_booster, serial_boosted, serial_optimizer, slice(None)),
            ):
                o.zero_grad()
                b.backward(criterion(m(x[part]), y[part]), o)
                norm = o.clip_grad_by_norm(0.1)
                assert norm.isfinite()
                o.step()
        tolerance = 1e-5 if precision is None else 5e-3
        for p, q in zip(_whole(boosted), serial.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        booster.save_model(boosted, folder / "model", shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, folder / "optimizer")
        other = mlp()
        booster.load_model(other, folder / "model")
        for p, q in zip(_whole(boosted), other.parameters(), strict=True):
            assert torch.equal(p.cpu(), q)
        assert torch.load(folder / "optimizer", weights_only=True)["state"][0]["exp_avg"].device.type == "cpu"
        booster.load_optimizer(optimizer, folder / "optimizer")
        optimizer.zero_grad()
        booster.backward(criterion(boosted(x[own]), y[own]), optimizer)
        optimizer.step()
    if backend == "nccl":
        with pytest.raises(RuntimeError, match="the backend 'nccl' cannot exchange"):
            Booster(device="cpu", plugin=plugin(**options)).boost(mlp())


def _whole(model: nn.Module) -> list[Tensor]:
    """All of every parameter, on the GPU."""
    return [(whole_tensor(p) if hasattr(p, "full_tensor") else p.detach()).cuda() for p in model.parameters()]


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 1), ("gloo", 2)])
def test_ddp_on_one_gpu(backend: str, world_size: int, tmp_path: Path) -> None:
    spawn(_train, world_size, backend=backend, folder=tmp_path, plugin=TorchDDPPlugin, options={})


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 1), ("gloo", 2)])
def test_fsdp_on_one_gpu(backend: str, world_size: int, offload: bool, tmp_path: Path) -> None:
    options = {"cpu_offload": offload}
    spawn(_train, world_size, backend=backend, folder=tmp_path, plugin=TorchFSDPPlugin, options=options)


def test_devices_that_are_not_there_are_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        ValueError, match=rf"device 'cuda:{count}' was asked for, but torch sees {count} CUDA"
    ):
        Booster(device=f"cuda:{count}")


def test_inputs_on_the_cpu_are_moved_by_ddp() -> None:
    spawn(_inputs, 1)


def _inputs(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("nccl", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    model, *_ = Booster(plugin=TorchDDPPlugin()).boost(mlp())
    assert model(torch.ones(2, 6)).device.type == "cuda"
