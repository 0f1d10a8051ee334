"""Gemini on a GPU: the same numbers as on one device, whatever comes and goes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from colossalai.testing import check_state_dict_equal
from colossalai.zero.gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from tests.zero.gemini.runs import SMALL, batch, hybrid, loss_of, net, sgd
from tests.zero.gemini.test_disk import BYTES
from tests.zero.gemini.test_speculative import SCALES, loud

pytestmark = pytest.mark.gpu


def both(
    policy: str, dtype: torch.dtype, early: bool, reentrant: bool | None, **options: object
) -> GeminiDDP:
    # in bf16 host and device round differently, and Adam would make whole steps of gradients that are nothing
    # but rounding
    optim = hybrid if dtype is torch.float32 else sgd
    model = net(reentrant)
    serial = copy.deepcopy(model).to("cuda", dtype)
    reference = optim(serial.parameters())
    inner = optim(model.parameters())
    small = SMALL * dtype.itemsize
    run = GeminiDDP(
        model, "cuda", policy, dtype=dtype, min_chunk_size_mb=small, search_range_mb=small, **options
    )
    optimizer = GeminiOptimizer(inner, run, update_in_backward=early)
    for step in range(6):
        words = batch(step).cuda()
        expected = loss_of(serial, words)
        expected.backward()
        reference.step()
        reference.zero_grad()
        loss = loss_of(run, words)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        limit = 1e-4 if dtype is torch.float32 else 5e-2
        assert (loss - expected).abs() <= limit * expected.abs(), step
    weights = run.state_dict()
    for name, tensor in serial.state_dict().items():
        if tensor.is_floating_point():
            error = (weights[name].float() - tensor.cpu().float()).abs().max()
            assert error <= limit * tensor.float().abs().max().cpu(), name
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["cpu", "cuda", "auto", "const"])
def test_policies(policy: str, dtype: torch.dtype) -> None:
    for early, reentrant in ((False, None), (True, False), (True, True)):
        both(policy, dtype, early, reentrant)


def test_a_small_tier() -> None:
    run = both("cpu", torch.bfloat16, True, True, compute_capacity=8_000, prefetch=1)
    assert run.chunk_manager.compute.peak <= 8_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("early", "share"), [(False, 0.5), (True, 0.5), (True, 0.25)])
def test_the_disk_tier(dtype: torch.dtype, early: bool, share: float, tmp_path: Path) -> None:
    needed = sum(p.numel() for p in net().parameters()) * BYTES[dtype]
    options = {"host_buffers": 2} if early else {}
    run = both(
        "cpu", dtype, early, True, disk_dir=str(tmp_path), host_capacity=int(share * needed), **options
    )
    chunks = run.chunk_manager
    assert all(tier.peak <= tier.limit for tier in chunks.tiers)
    assert chunks.total_mem["disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_the_disk_tier_with_large_chunks(tmp_path: Path) -> None:
    def train(**options: object) -> tuple[dict[str, torch.Tensor], GeminiDDP]:
        torch.manual_seed(0)
        body = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)])
        model = GeminiDDP(
            body, "cuda", "cpu", dtype=torch.bfloat16, min_chunk_size_mb=2.01, search_range_mb=0.1, **options
        )
        optimizer = GeminiAdamOptimizer(model, lr=1e-3, update_in_backward=True)
        for step in range(6):
            x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), model

    expected, _ = train()
    got, model = train(disk_dir=str(tmp_path), host_capacity=36 * 2**20, host_buffers=2)
    assert any(map(model.chunk_manager.is_on_disk, model.chunk_manager.chunks))
    check_state_dict_equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_speculative_updates(dtype: torch.dtype) -> None:
    assert loud(SCALES, dtype, True, device="cuda").undone > 0
    loud(SCALES, dtype, False, device="cuda")


def test_movement_is_measured() -> None:
    model = GeminiDDP(
        torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]),
        "cuda",
        "cpu",
        dtype=torch.bfloat16,
        min_chunk_size_mb=8,
    )
    optimizer = GeminiAdamOptimizer(model, lr=1e-3, update_in_backward=True)
    model.gemini_manager.timeline.timed = True
    for _ in range(4):
        optimizer.backward(model(torch.randn(512, 2048, device="cuda")).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    numbers = model.gemini_manager.timeline.numbers()
    assert numbers.copying > 0
    assert numbers.hidden is not None
    assert numbers.bytes_up >= 8 * 2048 * 2048 * 2
