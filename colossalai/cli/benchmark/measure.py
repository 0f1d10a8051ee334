"""One process of the benchmark: joins the plan, builds the model, warms up, times steps and counts bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.cli.benchmark.models import MODELS, ModelSizes
from colossalai.cli.benchmark.plans import BenchmarkPlan
from colossalai.launchers import launch_from_torch
from colossalai.mesh import count_communication, shard
from colossalai.nn.modes import current
from colossalai.utils import get_current_device, synchronize
from colossalai.utils.memory.live_bytes import LiveBytes


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """The measurement to make under every plan."""

    model: str
    shape: ModelSizes
    warmup_steps: int
    profile_steps: int
    device: str

    @property
    def steps(self) -> int:
        """All steps of one plan; after the timed ones, one is counted."""
        return self.warmup_steps + self.profile_steps + 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The milliseconds and bytes of one rank, per step."""

    forward: float
    backward: float
    allocated: int
    cached: int | None
    """What the GPU's allocator held at most; the CPU's keeps no account."""
    sent_forward: float
    sent_backward: float


def measure(
    rank: int,
    world_size: int,
    port: int,
    *,
    plan: BenchmarkPlan,
    request: MeasureRequest,
    ticks: str | None = None,
) -> Measurement:
    """Run ``request`` as one rank of ``plan``; rank 0 adds a byte to the file ``ticks`` after every step."""
    backend = "nccl" if request.device == "cuda" else "gloo"
    launch_from_torch(plan.config, backend=backend, verbose=False)
    return _Measurement(request, ticks if rank == 0 else None).run()


class _Measurement:
    def __init__(self, request: MeasureRequest, ticks: str | None) -> None:
        self.request, self.ticks = request, Path(ticks) if ticks else None
        self.device = get_current_device()
        row = MODELS[request.model]
        self.model: nn.Module = row.build(request.shape).to(self.device)
        self.batch = [self._part(t, row.features) for t in row.draw(request.shape)]

    def _part(self, whole: Tensor, features: bool) -> Tensor:
        tp, mesh = current()
        if not features:
            return col_nn.partition_batch(whole).to(self.device)
        part = whole if mesh is None or tp.size == 1 else shard(whole, tp.hidden, mesh)
        return part.to(self.device).requires_grad_()  # as in the middle of a network

    def run(self) -> Measurement:
        for _ in range(self.request.warmup_steps):
            self._step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [self._step() for _ in range(self.request.profile_steps)]
        forward, backward = (sum(column) / len(times) for column in zip(*times, strict=True))
        allocated, cached = self._device_memory()
        (sent_forward, sent_backward), live = self._count()
        return Measurement(
            forward=forward,
            backward=backward,
            allocated=live if allocated is None else allocated,
            cached=cached,
            sent_forward=sent_forward,
            sent_backward=sent_backward,
        )

    def _step(self) -> tuple[float, float]:
        """Milliseconds of the forward and of the backward pass."""
        self._forget()
        if dist.get_world_size() > 1:
            dist.barrier()  # no rank waits inside the measurement for one that began later
        loss, forward = _timed(lambda: self.model(*self.batch))
        _, backward = _timed(loss.backward)
        self._tick()
        return forward, backward

    def _forget(self) -> None:
        self.model.zero_grad()
        for tensor in self.batch:
            tensor.grad = None

    def _device_memory(self) -> tuple[int | None, int | None]:
        if self.device.type == "cpu":
            return None, None
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def _count(self) -> tuple[tuple[float, float], int]:
        """Bytes sent forward and backward, and on a CPU the most bytes alive, in one more step that is not
        timed.
        """
        self._forget()
        with LiveBytes() as live:
            live.hold([*self.model.parameters(), *self.batch])
            with count_communication() as forward:
                loss = self.model(*self.batch)
            with count_communication() as backward:
                loss.backward()
        self._tick()
        return (forward.sent(), backward.sent()), live.peak

    def _tick(self) -> None:
        if self.ticks is not None:
            with self.ticks.open("ab", buffering=0) as file:
                file.write(b".")


def _timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    synchronize()
    start = time.perf_counter()
    result = work()
    synchronize()
    return result, (time.perf_counter() - start) * 1000
