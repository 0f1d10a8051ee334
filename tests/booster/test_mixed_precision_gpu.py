"""On one GPU: every precision under DDP, with NCCL and with two gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16ApexMixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn

pytestmark = pytest.mark.gpu


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4)
    )


def _train(rank: int, world_size: int, port: int, backend: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    precisions = ["fp16", "fp16_naive", "fp16_apex", FP16ApexMixedPrecision("O2"), "bf16", "fp8"]
    for precision in precisions:
        model = _net()
        raw = torch.optim.AdamW(model.parameters(), lr=3e-3)
        booster = Booster(mixed_precision=precision, plugin=TorchDDPPlugin())
        boosted, optimizer, criterion, *_ = booster.boost(model, raw, nn.CrossEntropyLoss())
        assert criterion is not None
        losses = []
        for step in range(30):
            generator = torch.Generator().manual_seed(step * world_size + rank)
            x = torch.randn(64, 32, generator=generator)
            y = x[:, :4].argmax(1)
            optimizer.zero_grad()
            loss = criterion(boosted(x.cuda()), y.cuda())
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), precision
        before = copy.deepcopy(boosted.state_dict())
        if precision not in ("bf16", "fp8"):  # an overflow on the last rank is seen by all
            optimizer.zero_grad()
            bad = float("inf") if rank == world_size - 1 else 1.0
            booster.backward(F.cross_entropy(boosted(x.cuda()).float(), y.cuda()) * bad, optimizer)
            optimizer.step()
            assert optimizer.step_was_skipped, precision
            for name, p in boosted.named_parameters():
                assert torch.equal(p, before[name]), precision
        for tensor in (*boosted.parameters(), *optimizer.parameters()):
            others = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(others, tensor.detach().contiguous())
            assert all(torch.equal(others[0], other) for other in others), precision


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)])
def test_every_precision_under_ddp_on_one_gpu(backend: str, world_size: int) -> None:
    spawn(_train, world_size, backend=backend)
