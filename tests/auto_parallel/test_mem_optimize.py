"""``memory_optimize`` trains as the plain model does, and keeps its budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from colossalai.auto_parallel.offload.mem_optimize import _activations, memory_optimize
from colossalai.launchers import launch_from_torch
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import assert_close, spawn
from colossalai.zero import ZeroOptimizer
from tests.auto_parallel.models import IDS, gpt2


def _train(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({}, backend="gloo")
    inps = {"input_ids": IDS, "labels": IDS}
    found: list[list[Tensor]] = []
    weights = sum(p.nbytes for p in gpt2().parameters())
    for solver, room in ((None, 0), ("syn", 0), ("asyn", 3 * weights)):
        torch.manual_seed(0)
        model = gpt2(dropout=0.0)
        losses = []
        if solver is None:
            plain = HybridAdam(model.parameters(), lr=1e-2)
        else:
            budget = _activations(model, inps) + room if room else -1
            model = memory_optimize(model, inps, budget, solver)  # type: ignore[assignment]
            zero = ZeroOptimizer(HybridAdam(model.parameters(), lr=1e-2), model, initial_scale=1)
        for _ in range(3):
            loss = model(**inps).loss
            losses.append(loss.detach().clone())
            if solver is None:
                loss.backward()
                plain.step()
                plain.zero_grad()
            else:
                zero.backward(loss)
                zero.step()
                zero.zero_grad()
        found.append(losses)
    for losses in found[1:]:
        for mine, theirs in zip(losses, found[0], strict=True):
            assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the activations of a step need"):
        memory_optimize(gpt2(), inps, 1000)
    with pytest.raises(ValueError, match="'syn' or 'asyn', got 'best'"):
        memory_optimize(gpt2(), inps, solver_name="best")  # type: ignore[arg-type]


def test_training() -> None:
    spawn(_train, 1)
