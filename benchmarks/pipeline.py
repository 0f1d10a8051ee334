"""The bubble of every schedule as measured, beside its formula, and the time of a step beside that of 1F1B.

The work of a stage is *controlled*: a forward pass takes ``FORWARD`` seconds, each half of a backward pass as
much, and a chunk its share.  It is a wait for a moment on the clock of the wall, as that of a host for its
GPU; a loop of a fixed amount of computing would measure how many ranks share a core.  So any number of ranks
can be measured on two cores, and what is left is what ours is to answer for: the order of the passes,
messages, and the time that the executor takes itself.

Other programs on the same cores delay messages; ``chrt -f 5 python benchmarks/pipeline.py`` (as root) keeps
them from it.

``python benchmarks/pipeline.py --picture`` draws docs/source/en/pipeline_run.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import colossalai
from benchmarks.table import Row, show
from colossalai.pipeline import Recording, record_run
from colossalai.pipeline.recording.recording import draw
from colossalai.pipeline.schedule import bubble_formula
from colossalai.testing import spawn

FORWARD = 0.2
WARM, MEASURED = 1, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}  # with their chunks
SIZES = ((2, 4), (4, 8))  # ranks, micro-batches
PICTURE = Path(__file__).parents[1] / "docs/source/en" / "pipeline_run.png"


def wait(what: str, seconds: float) -> None:
    """Until ``seconds`` after now; the last half of a millisecond awake, as sleepers may oversleep by
    that.
    """
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - 5e-4, 0))
    while time.perf_counter() < end:
        pass


class _Input(torch.autograd.Function):
    """Waits in the forward pass, and where the gradient of the input is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        wait("forward", seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wait("input", ctx.seconds)
        return grads[0], None


class _Weight(torch.autograd.Function):
    """Waits where the gradient of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wait("weight", ctx.seconds)
        return grads[0], None


class Controlled(nn.Module):
    """A stage that takes ``seconds`` forwards, as long for the gradient of its input and as long for that of
    its weight.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        # the data too, so that all stages have the same work; no stage waits for the data's gradient, so the
        # first stage does both halves of its backward pass in the second
        x.requires_grad_(True)
        return _Input.apply(x, self.seconds) * _Weight.apply(self.weight, self.seconds)


def mean(output: Tensor, label: Tensor) -> Tensor:
    return output.mean()


def run(
    rank: int, world_size: int, port: int, schedule: str, microbatches: int, seconds: float, steps: int
) -> Recording:
    """``steps`` steps of controlled stages."""
    chunks = SCHEDULES[schedule]
    colossalai.launch_from_torch(
        config={
            "parallel": {"pipeline": {"size": world_size, "schedule": schedule}},
            "NUM_MICRO_BATCHES": microbatches,
            "NUM_CHUNKS": chunks,
            "TENSOR_SHAPE": (1, 4),
        },
        backend="gloo",
        verbose=False,
    )
    torch.set_num_threads(1)
    stages = [Controlled(seconds / chunks) for _ in range(chunks)]
    model = stages[0] if chunks == 1 else nn.ModuleList(stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, mean, verbose=False)
    batch = torch.ones(microbatches, 4), torch.zeros(microbatches)
    with record_run() as recording:
        for _ in range(steps):
            engine.zero_grad()
            engine.execute_schedule(iter([batch]), return_output_label=False)
            engine.step()
    return recording


def measured(schedule: str, ranks: int, microbatches: int) -> Recording:
    found: Recording = spawn(
        run,
        ranks,
        schedule=schedule,
        microbatches=microbatches,
        seconds=FORWARD,
        steps=WARM + MEASURED,
        timeout=600,
    )[0]
    found.steps = found.steps[WARM:]
    return found


def rows() -> list[Row]:
    bubbles, times = [], []
    for ranks, microbatches in SIZES:
        seconds: dict[str, float] = {}
        for name in SCHEDULES:
            steps = measured(name, ranks, microbatches).steps
            played = [step.pipelines[""] for step in steps]
            formula = bubble_formula(steps[0].timetable)
            assert formula is not None, "there are enough micro-batches"
            bubble = median(p.bubble for p in played)
            where = f"{name}, {ranks} ranks, {microbatches} micro-batches"
            bubbles.append(Row(f"bubble of {where}", 100 * bubble, 100 * formula, "formula", unit="% "))
            seconds[name] = 1000 * median(p.makespan for p in played)
            if name.startswith("zb"):
                times.append(Row(f"step of {where}", seconds[name], seconds["1f1b"], "1f1b"))
    return bubbles + times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", action="store_true", help=f"draw {PICTURE.name} instead")
    if parser.parse_args().picture:
        steps = [measured(name, 4, 8).steps[-1] for name in ("1f1b", "zbv")]
        draw(PICTURE, [(step.timetable, "", step.pipelines[""]) for step in steps], "s")
    else:
        print(show(rows()))
