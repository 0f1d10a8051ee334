"""The activations that stages keep, in bytes: counted in a step, beside the theory of each schedule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh import Mesh
from colossalai.pipeline.chunks import ModelChunks
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.schedule import make_timetable
from colossalai.testing import spawn
from tests.pipeline.memory import peak_bytes
from tests.pipeline.plans import launch

ACTIVATION = 1 << 20  # bytes that a pass keeps; all else is far less
CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (1, 2), "zbh1": (1,), "zbv": (2,)}


def stored_by_theory(schedule: str, p: int, m: int, c: int, r: int) -> int:
    """Passes on rank r; those of the page. zbv has an upper limit only."""
    return {
        "gpipe": c * m,
        "1f1b": min(m, p - r),
        "interleaved": min(c * m, 2 * (p - r - 1) + (c - 1) * p + 1) if c > 1 else min(m, p - r),
        "zbh1": min(m, p),
        "zbv": min(2 * m, 2 * p),
    }[schedule]


class _Keep(torch.autograd.Function):
    """Keeps one activation for the backward pass, and makes no other tensor of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(ACTIVATION, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.saved_tensors[0].numel() == ACTIVATION
        return grads[0]


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Keep.apply(x * self.weight) * self.weight.detach()


class LossOwner:
    """The least that a pipeline asks of who trains."""

    def expect_gradients(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


def check_bytes(rank: int, world_size: int, port: int) -> list[tuple[Any, ...]]:
    launch({"parallel": {"pipeline": world_size}, "NUM_MICRO_BATCHES": 1})
    mesh = Mesh({"pp": world_size})
    found = []
    for (schedule, all_chunks), m in itertools.product(CHUNKS.items(), (1, 4, 8)):
        for c in all_chunks:
            if schedule == "interleaved" and m % world_size:
                continue
            model = Keeper() if c == 1 else ModelChunks([Keeper() for _ in range(c)])
            pipeline = Pipeline(model, mesh, schedule=schedule, microbatches=m)
            x = torch.ones(m, 1)
            step = lambda p=pipeline, x=x: p.step(x, x, nn.functional.mse_loss, LossOwner())  # noqa: E731
            _, peak = peak_bytes(step)
            found.append((schedule, m, c, rank, peak // ACTIVATION, peak % ACTIVATION))
    return found


@pytest.mark.parametrize(
    "p", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4]
)
def test_the_bytes_of_activations_are_those_of_the_theory(p: int) -> None:
    for schedule, m, c, r, activations, others in itertools.chain(*spawn(check_bytes, p)):
        where = schedule, p, m, c, r
        assert activations == make_timetable(schedule, p, m, c).peak_stored(r), where
        theory = stored_by_theory(*where)
        assert activations <= theory if schedule == "zbv" else activations == theory, where
        assert others < ACTIVATION / 2, where
