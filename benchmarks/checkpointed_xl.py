"""GPT-2 XL of transformers, unedited, under ``auto_checkpoint``, beside that of our zoo with selective
recomputation: 8 x 1024 tokens, bf16, compiled, with the step of the optimizer.

Compiling 48 blocks takes minutes of a CPU, so both sides compile at the same time, each in a process of its
own; then they wait for each other, and use the GPU in turns.  ``eager`` leaves the compiler out, which takes
half a minute.  Then, and with fewer layers, the budget is what the zoo's model was seen to need.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.training import BATCH, LENGTH, Step, boosted, hugging_face, own_loss, zoo
from benchmarks.training import XL as SIZES
from benchmarks.visit import end_after, turn
from colossalai.auto_parallel import auto_checkpoint
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.nn.optimizer import HybridAdam

GIB = 2**30
BUDGET = 30.6
"""GiB that the zoo's model needs, compiled, with all layers."""
WARM, TIMED, TURNS, TICK = 6, 10, 3, 30.0
ZOO, OURS = "zoo, selective", "transformers, auto_checkpoint"


def planned(layers: int, *, eager: bool) -> Step:
    """The model of transformers, with a plan for the bytes that come in, made before it is compiled."""
    model = hugging_face("gpt2-xl", layers)
    model = skip_causal_mask(chunk_causal_loss(model, whole_scores=False)).bfloat16()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    memory = int(float(sys.stdin.readline()) * GIB)
    optimizer = HybridAdam(model.parameters())
    batch = {"input_ids": ids, "labels": ids}
    plan = auto_checkpoint(
        model, batch, memory, optimizer=optimizer, device="h200", measure=False, regions=False
    )
    print(plan, flush=True)
    return boosted(model, BF16MixedPrecision(half_weights=True), own_loss, compiled=not eager)


def _side(name: str, layers: int, *, eager: bool) -> None:
    """One side: compile, say so, then time some steps whenever a line comes in."""
    start = time.perf_counter()
    is_ready = threading.Event()
    threading.Thread(target=_tick, args=(start, is_ready), daemon=True).start()
    if name == ZOO:
        step = zoo({**SIZES, "depth": layers}, compiled=not eager)
    else:
        step = planned(layers, eager=eager)
    print(f"built after {time.perf_counter() - start:.0f} s", flush=True)
    ids = torch.randint(50304, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    step(ids)
    torch.cuda.synchronize()
    print(f"first step after {time.perf_counter() - start:.0f} s", flush=True)
    with turn():
        for _ in range(WARM):
            step(ids)
    is_ready.set()
    print("ready", flush=True)
    for _ in sys.stdin:
        with turn():
            print(json.dumps(_timed(step, ids)), flush=True)


def _timed(step: Step, ids: Tensor) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    step(ids)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED):
        loss = step(ids)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / TIMED
    return {"ms": seconds * 1e3, "GiB": torch.cuda.max_memory_allocated() / GIB, "loss": loss.item()}


def _tick(start: float, is_ready: threading.Event) -> None:
    while not is_ready.wait(TICK):
        print(f"{time.perf_counter() - start:.0f} s so far", flush=True)


class _Side:
    """The process of one side."""

    def __init__(self, name: str, layers: int, *, eager: bool) -> None:
        self.name, self.runs = name, list[dict[str, float]]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpointed_xl", name, str(layers), str(int(eager))],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        """Print what it says until it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"{self.name}: {line.rstrip()}", flush=True)
            if line.startswith("ready"):
                return
        raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")

    def run(self) -> dict[str, float]:
        """Time some steps."""
        assert self.process.stdout is not None
        self.say("go")
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")
        self.runs.append(json.loads(line))
        print(f"{self.name}: {self.runs[-1]}", flush=True)
        return self.runs[-1]

    def end(self) -> None:
        self.process.kill()


def compare(seconds: float | None = None, *, eager: bool = False, layers: int | None = None) -> None:
    """Both sides, one after the other, a few times; all ends after so many ``seconds``."""
    depth = SIZES["depth"] if layers is None else layers
    zoos, ours = sides = [_Side(name, depth, eager=eager) for name in (ZOO, OURS)]
    end_after(seconds, lambda: [side.end() for side in sides] and None)
    try:
        is_known = depth == SIZES["depth"] and not eager
        if is_known:
            ours.say(str(BUDGET))
        threads = [threading.Thread(target=ours.wait)] if is_known else []
        for thread in threads:
            thread.start()
        zoos.wait()
        budget = max(BUDGET if is_known else 0.0, zoos.run()["GiB"])
        if is_known:
            threads[0].join()
        else:
            ours.say(str(budget))
            ours.wait()
        for _ in range(TURNS):
            ours.run()
            zoos.run()
        _tell(zoos.runs, ours.runs, budget)
    finally:
        for side in sides:
            side.end()
            side.process.wait()


def _tell(zoos: list[dict[str, float]], ours: list[dict[str, float]], budget: float) -> None:
    zoo, mine = (min(runs, key=lambda run: run["ms"]) for runs in (zoos, ours))
    verdict = "ok" if mine["ms"] <= zoo["ms"] and mine["GiB"] <= budget else "MISSED"
    print(
        f"GPT-2 XL: {mine['ms']:.1f} ms, {mine['GiB']:.2f} GiB against {zoo['ms']:.1f} ms,"
        f" {zoo['GiB']:.2f} GiB: {mine['ms'] / zoo['ms']:.3f}, {mine['GiB'] / zoo['GiB']:.3f}: {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    _side(sys.argv[1], int(sys.argv[2]), eager=sys.argv[3] == "1")
