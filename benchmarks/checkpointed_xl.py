"""GPT-2 XL of transformers, unedited, under ``auto_checkpoint``, beside that of our zoo with selective
recomputation: 8 x 1024 tokens, bf16, compiled, with the step of the optimizer.

Compiling 48 blocks takes minutes of a CPU, so both sides compile at the same time, each in a process of its
own; then they wait for each other, and use the GPU in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.training import BATCH, LENGTH, Step, boosted, hugging_face, own_loss, zoo
from benchmarks.training import XL as SIZES
from colossalai.auto_parallel import auto_checkpoint
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.nn import chunk_causal_loss, skip_causal_mask
from colossalai.nn.optimizer import HybridAdam

MEMORY = "30.6 GiB"
WARM, TIMED, TURNS = 6, 10, 3


def planned() -> Step:
    """The model of transformers, with a plan for ``MEMORY`` made before it is compiled."""
    model = skip_causal_mask(chunk_causal_loss(hugging_face("gpt2-xl"), whole_scores=False)).bfloat16()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plan = auto_checkpoint(
        model,
        batch,
        MEMORY,
        optimizer=HybridAdam(model.parameters()),
        device="h200",
        measure=False,
        regions=False,
    )
    print(plan, flush=True)
    return boosted(model, BF16MixedPrecision(half_weights=True), own_loss)


SIDES = {"zoo, selective": lambda: zoo(SIZES), "transformers, auto_checkpoint": planned}


def _side(name: str) -> None:
    """One side: compile, say so, then time some steps whenever a line comes in."""
    start = time.perf_counter()
    step = SIDES[name]()
    ids = torch.randint(50304, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(WARM):
        step(ids)
    torch.cuda.synchronize()
    print(f"ready after {time.perf_counter() - start:.0f} s", flush=True)
    for _ in sys.stdin:
        torch.cuda.reset_peak_memory_stats()
        step(ids)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TIMED):
            loss = step(ids)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / TIMED
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"ms": seconds * 1e3, "GiB": peak, "loss": loss.item()}), flush=True)


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    sides = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpointed_xl", name],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in SIDES
    }
    try:
        _take_turns(sides)
    finally:
        for side in sides.values():
            side.kill()
            side.wait()


def _take_turns(sides: dict[str, subprocess.Popen[str]]) -> None:
    for name, side in sides.items():
        assert side.stdout is not None
        for line in side.stdout:
            print(f"{name}: {line.rstrip()}", flush=True)
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError(f"{name} ended with code {side.wait()}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(TURNS):
        for name, side in sides.items():
            assert side.stdin is not None
            assert side.stdout is not None
            side.stdin.write("go\n")
            side.stdin.flush()
            found[name].append(json.loads(side.stdout.readline()))
            print(f"{name}: {found[name][-1]}", flush=True)
    zoos, ours = (min(runs, key=lambda run: run["ms"]) for runs in found.values())
    verdict = "ok" if ours["ms"] <= zoos["ms"] and ours["GiB"] <= max(30.6, zoos["GiB"]) else "MISSED"
    print(
        f"GPT-2 XL: {ours['ms']:.1f} ms, {ours['GiB']:.2f} GiB against {zoos['ms']:.1f} ms,"
        f" {zoos['GiB']:.2f} GiB: {ours['ms'] / zoos['ms']:.3f}, {ours['GiB'] / zoos['GiB']:.3f}: {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    _side(sys.argv[1])
