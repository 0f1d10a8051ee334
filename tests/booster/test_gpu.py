"""On CUDA: one rank with NCCL, and several ranks with gloo on one GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from tests.booster.plans import batches, mlp

pytestmark = pytest.mark.gpu


def _train(rank: int, world_size: int, port: int, backend: str, folder: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    for precision in (None, "fp16", "bf16"):
        torch.manual_seed(0)
        model = mlp()
        serial = copy.deepcopy(model).cuda()
        raw = torch.optim.AdamW(model.parameters(), lr=0.01)
        serial_raw = torch.optim.AdamW(serial.parameters(), lr=0.01)
        booster = Booster(mixed_precision=precision, plugin=TorchDDPPlugin())
        boosted, optimizer, criterion, *_ = booster.boost(model, raw, nn.CrossEntropyLoss())
        serial_booster = Booster(mixed_precision=precision)
        serial_boosted, serial_optimizer, *_ = serial_booster.boost(serial, serial_raw)
        assert next(boosted.parameters()).device == torch.device("cuda", 0)
        assert criterion is not None
        for x, y in batches((16, 16, 8)):
            x, y = x.cuda(), y.cuda()
            for b, m, o, part in (
                (booster, boosted, optimizer, slice(rank, None, world_size)),
                (serial_booster, serial_boosted, serial_optimizer, slice(None)),
            ):
                o.zero_grad()
                b.backward(criterion(m(x[part]), y[part]), o)
                norm = o.clip_grad_by_norm(0.1)
                assert norm.isfinite()
                o.step()
        tolerance = 1e-5 if precision is None else 5e-3
        for p, q in zip(boosted.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        booster.save_model(boosted, folder / "model", shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, folder / "optimizer")
        other = mlp()
        booster.load_model(other, folder / "model")
        for p, q in zip(boosted.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.cpu(), q)
        assert torch.load(folder / "optimizer", weights_only=True)["state"][0]["exp_avg"].device.type == "cpu"
        booster.load_optimizer(optimizer, folder / "optimizer")
        optimizer.step()
    if backend == "nccl":
        with pytest.raises(RuntimeError, match="the backend 'nccl' cannot exchange"):
            Booster(device="cpu", plugin=TorchDDPPlugin()).boost(mlp())


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 1), ("gloo", 2)])
def test_ddp_on_one_gpu(backend: str, world_size: int, tmp_path: Path) -> None:
    spawn(_train, world_size, backend=backend, folder=tmp_path)


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
