"""The largest GPT that trains one step within a given GPU and host memory; a mode of ``benchmarks.offload``.

    python -m benchmarks.offload --capacity-search --capacity-gib 16 --host-gib 110 --disk-dir /tmp
    python -m benchmarks.offload --capacity-search --capacity-gib 16 --host-gib 110 --confirm gemini-cpu=80

The depth is varied.  It is predicted from the bytes that a parameter takes, then tried, each time in a
process of its own: down until it fits, up until it does not.  A try fits if one step of batch 1 is done,
within the time limit, and no more host memory was used than allowed: the resident memory of the process, or
what became unavailable on the machine, whichever is more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import offload

SEARCHED = ("gemini-cpu", "fsdp2-offload", "plain-pytorch", "gemini-disk")
FIXED_GIB = 6.0  # of the host: CUDA, Python, buffers
HOST_BYTES = {"gemini-cpu": 12.2, "fsdp2-offload": 20.5, "gemini-disk": 12.2}  # of a parameter
GPU_BYTES = {"plain-pytorch": 17.5}
STEP = 1.06  # from a depth to the next that is tried
TRIES = 3


@dataclass(frozen=True)
class Try:
    side: str
    depth: int
    parameters: int
    fits: bool
    gpu_gib: float = 0.0
    host_gib: float = 0.0
    start: float = 0.0
    step: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.side:16}{self.depth:6}{self.parameters / 1e9:9.2f}"
            f" B{'yes' if self.fits else 'no':>6}{self.gpu_gib:9.1f}{self.host_gib:10.1f}"
            f"{self.start:9.1f}{self.step:9.1f}  {self.why}"
        )


HEAD = (
    f"{'side':16}{'depth':>6}{'params':>11}{'fits':>6}{'GPU GiB':>9}{'host GiB':>10}"
    f"{'start s':>9}{'step s':>9}"
)


def available_gib() -> float:
    """Host memory that is available on the machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


class HostWatch:
    """The most host memory that was used since it began."""

    def __init__(self) -> None:
        self.before = self.least = available_gib()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.least = min(self.least, available_gib())

    def most(self) -> float:
        import resource

        self._stop.set()
        self._thread.join()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return max(resident, self.before - self.least)


def predicted(side: str, args: argparse.Namespace) -> int:
    """The depth that should just fit."""
    host = max(args.host_gib - FIXED_GIB, 0.0)
    if side == "gemini-disk":
        host += args.disk_gib
    budget = host / HOST_BYTES[side] if side in HOST_BYTES else args.capacity_gib / GPU_BYTES[side]
    return max(1, int((budget * 2**30 - around(args)) / block(args)))


def block(args: argparse.Namespace) -> int:
    """Parameters of a block."""
    return 12 * args.width**2 + 13 * args.width


def around(args: argparse.Namespace) -> int:
    """Parameters that do not depend on the depth."""
    return int((offload.BIG["vocab_size"] + args.length + 2) * args.width)


def train_once(side: str, args: argparse.Namespace) -> Try:
    """One step, in this process."""
    watch = HostWatch()
    if torch.cuda.is_available() and args.capacity_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.capacity_gib * 2**30 / total))
    args.host_gib -= FIXED_GIB  # what is not model data
    args.quick = True
    if side.startswith("gemini") and args.host_buffers is None:
        args.host_buffers = 4
    begin = time.perf_counter()
    step, finish, parameters, _ = offload.SIDES[side](args)
    offload.wait()
    start = time.perf_counter() - begin
    words = (offload.TOY if args.small else offload.BIG)["vocab_size"]
    ids = torch.randint(words, (1, args.length), device=offload.device())
    loss = float(step(ids))
    finish()
    offload.wait()
    seconds = time.perf_counter() - begin - start
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return Try(side, args.depth, parameters, True, peak, watch.most(), start, seconds, f"loss {loss:.3f}")


def attempt(side: str, depth: int, args: argparse.Namespace) -> Try:
    """The same in a process of its own, within the time limit."""
    given = [a for a in sys.argv[1:] if a != "--capacity-search"]
    if "--confirm" in given:
        at = given.index("--confirm")
        given = given[:at] + given[at + 1 + len(args.confirm) :]
    command = [sys.executable, "-m", "benchmarks.capacity", *given, "--depth", str(depth), "--one", side]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    size = around(args) + depth * block(args)
    try:
        found: Any = subprocess.run(
            command,
            capture_output=True,
            cwd=Path(__file__).resolve().parent.parent,
            env=environment,
            timeout=args.limit_s,
        )
    except subprocess.TimeoutExpired:
        return Try(side, depth, size, False, why=f"not done in {args.limit_s:.0f} s")
    if found.returncode:
        last = (found.stderr.decode().strip().splitlines() or ["killed"])[-1]
        return Try(side, depth, size, False, why=f"exit code {found.returncode}: {last[:160]}")
    made = Try(**json.loads(found.stdout.decode().strip().splitlines()[-1]))
    if made.host_gib > args.host_gib:
        return Try(**{**asdict(made), "fits": False, "why": f"more host memory than {args.host_gib:.0f} GiB"})
    return made


def search(args: argparse.Namespace) -> None:
    """Try, and print."""
    print(HEAD, flush=True)
    best: dict[str, Try] = {}

    def tell(side: str, depth: int) -> bool:
        made = attempt(side, depth, args)
        print(made, flush=True)
        if made.fits and (side not in best or made.parameters > best[side].parameters):
            best[side] = made
        return made.fits

    if args.confirm:
        for wanted in args.confirm:
            side, depth = wanted.split("=")
            tell(side, int(depth))
    else:
        for side in args.sides or [s for s in SEARCHED if s != "gemini-disk" or args.disk_dir]:
            depth = predicted(side, args)
            fits = tell(side, depth)
            for _ in range(TRIES - 1):
                depth = max(depth + 1, int(depth * STEP)) if fits else min(depth - 1, int(depth / STEP))
                if depth < 1 or tell(side, depth) != fits:
                    break
    print("largest: " + ", ".join(f"{t.side} {t.parameters / 1e9:.2f} B" for t in best.values()))


if __name__ == "__main__":  # one try
    options = offload.arguments()
    print(json.dumps(asdict(train_once(options.one, options))), flush=True)
