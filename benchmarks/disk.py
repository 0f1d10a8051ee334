"""Tensors to and from a disk, and an optimizer whose states are there, against dd and fio with direct I/O on
the same disk.

The disk is that of the directory for temporary files (``TMPDIR`` names another one).  The best of several
tries counts, because others use disks too.

    python -m benchmarks.disk               # beside dd, and fio where it is installed
    python -m benchmarks.disk --requests    # before that, the speed at other sizes and numbers of requests
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.table import Row, show
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils.disk import DiskStore, aligned_empty

LARGE = torch.cuda.is_available()
TOTAL = (4 << 30) if LARGE else (1 << 29)  # bytes
SLOT = 16 << 20  # bytes of one tensor
BUFFERS = 5
TRIES = 3
KINDS = ("write a new file", "write it again", "read")


def speed(work: Callable[[], object]) -> float:
    """GB/s at which ``work`` moves ``TOTAL`` bytes."""
    start = time.perf_counter()
    work()
    return TOTAL / (time.perf_counter() - start) / 1e9


def ours(folder: str, threads: int = 8, request_bytes: int = 2 << 20) -> dict[str, float]:
    """Tensors that go round through a few buffers, as those of an optimizer do."""
    buffers = [aligned_empty(SLOT).zero_() for _ in range(BUFFERS)]
    store = DiskStore(folder, threads=threads, request_bytes=request_bytes)

    def go(call: Callable[[str, torch.Tensor], object]) -> None:
        pending: list = [None] * BUFFERS
        for number in range(TOTAL // SLOT):
            here = number % BUFFERS
            if pending[here] is not None:
                pending[here].wait()
            pending[here] = call(str(number), buffers[here])
        for last in pending:
            last.wait()

    found = {
        kind: speed(lambda kind=kind: go(store.read if kind == "read" else store.write)) for kind in KINDS
    }
    store.close()
    return found


def dd(folder: str) -> dict[str, float]:
    path = Path(folder, "dd")
    size = ["bs=16M", f"count={TOTAL >> 24}", "status=none"]
    write = ["dd", "if=/dev/zero", f"of={path}", "oflag=direct", *size]
    commands = (write, [*write, "conv=notrunc"], ["dd", f"if={path}", "of=/dev/null", "iflag=direct", *size])
    found = {
        kind: speed(lambda c=command: subprocess.run(c, check=True))
        for kind, command in zip(KINDS, commands, strict=True)
    }
    path.unlink()
    return found


def fio(folder: str) -> dict[str, float]:
    """Eight requests of 2 MiB at a time."""
    found = {}
    path = Path(folder, "fio")
    for kind, mode in (("write it again", "write"), ("read", "read")):
        command = ["fio", "--name=x", f"--filename={path}", f"--rw={mode}", "--bs=2M", f"--size={TOTAL}"]
        command += ["--direct=1", "--ioengine=libaio", "--iodepth=8", "--output-format=json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[kind] = json.loads(done.stdout)["jobs"][0][mode]["bw_bytes"] / 1e9
    path.unlink()
    return found


def best(tries: list[dict[str, float]]) -> dict[str, float]:
    return {kind: max(t[kind] for t in tries) for kind in tries[0]}


def step_seconds(folder: str) -> float:
    """One step of an AdamW with ``TOTAL`` bytes of states on the disk."""
    weights = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(TOTAL >> 23)]
    for p in weights:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = HybridAdam(weights, nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    optimizer.step()
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        tries = [(ours(folder), dd(folder)) for _ in range(TRIES)]  # in turns: a disk has moods
        mine, theirs = best([o for o, _ in tries]), best([d for _, d in tries])
        found = [
            Row(f"disk, {kind} (more is better)", mine[kind], theirs[kind], "dd, direct I/O", "GB/s")
            for kind in KINDS
        ]
        if shutil.which("fio"):
            found += [
                Row(f"disk, {kind} (more is better)", mine[kind], value, "fio, direct I/O, 8 x 2 MiB", "GB/s")
                for kind, value in best([fio(folder) for _ in range(TRIES)]).items()
            ]
        transfers = TOTAL / 1e9 / theirs["write it again"] + TOTAL / 1e9 / theirs["read"]
        what = f"AdamW, {TOTAL >> 23}M parameters, states on disk"
        step = step_seconds(folder)
        return [*found, Row(what, step * 1e3, transfers * 1e3, "dd reads and writes the states")]


def compare_requests() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for threads in (4, 8, 16):
            for request in (1 << 20, 2 << 20, 4 << 20):
                result = ", ".join(f"{k} {v:.2f} GB/s" for k, v in ours(folder, threads, request).items())
                print(f"{threads} threads, requests of {request >> 20} MiB: {result}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", action="store_true", help="compare sizes and numbers of requests first")
    if parser.parse_args().requests:
        compare_requests()
    print(show(rows()))
