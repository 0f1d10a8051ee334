"""On CUDA: one rank with NCCL, and several ranks with gloo on one GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import skip_if_not_enough_gpus, spawn
from colossalai.zero import LowLevelZeroOptimizer
from tests.zero.low_level.problems import Case, check_case, launch

pytestmark = pytest.mark.gpu

CASES = [
    Case(
        stage=stage,
        precision=precision,
        offload=offload,
        accumulate=accumulate,
        clip=clip,
        optimizer=name,
        device="cuda",
    )
    for stage, (precision, name), offload, accumulate, clip in itertools.product(
        (1, 2),
        (("fp32", "hybrid"), ("fp32", "adamw"), ("bf16", "sgd"), ("bf16", "torch_sgd"), ("fp16", "sgd")),
        (False, True),
        (1, 2),
        (0.0, 0.3),
    )
]


def check_cases(rank: int, world_size: int, port: int, backend: str, own_device: bool) -> None:
    torch.cuda.set_device(rank if own_device else 0)
    launch(backend)
    for case in [*CASES, Case(stage=2, recompute="reentrant", device="cuda")]:
        try:
            check_case(case)
        except Exception as error:
            raise AssertionError(f"{case} on {world_size} ranks: {error}") from error


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
def test_cases_on_one_gpu(backend: str, ranks: int) -> None:
    spawn(check_cases, ranks, backend=backend, own_device=False, timeout=300)


@skip_if_not_enough_gpus(2)
def test_cases_on_two_gpus() -> None:
    spawn(check_cases, 2, backend="nccl", own_device=True, timeout=300)


def check_memory(rank: int, world_size: int, port: int) -> None:
    torch.cuda.set_device(0)
    launch("gloo" if world_size > 1 else "nccl")
    elements = 2**24
    warm = nn.Linear(
        64, 64, device="cuda", dtype=torch.bfloat16
    )  # cuBLAS gets its workspaces, for both passes
    warm(torch.ones(1, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    for offload in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Linear(2**12, 2**12, bias=False, device="cuda", dtype=torch.bfloat16)
        optimizer = LowLevelZeroOptimizer(
            HybridAdam(model.parameters()),
            partition_grad=True,
            overlap_communication=True,
            cpu_offload=offload,
        )
        for _ in range(2):
            optimizer.backward(model(torch.ones(1, 2**12, device="cuda", dtype=torch.bfloat16)).sum())
            optimizer.step()
            optimizer.zero_grad()
        held = torch.cuda.memory_allocated() - before
        states = 0 if offload else 10 * elements / world_size
        assert held <= 2 * elements + states + 2**21
        if offload:
            assert all(piece.value.is_pinned() for piece in optimizer.pieces)
        del model, optimizer


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory(ranks: int) -> None:
    spawn(check_memory, ranks, timeout=120)
