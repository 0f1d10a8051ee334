"""``colossalai check --bandwidth``: latency and bandwidth of every collective, on this machine or in a job.

Started by hand, the command starts a process for each device of this machine.  Started by ``colossalai run``
or torchrun, its processes are those of the job, and rank 0 prints.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from colossalai.cli.spawned import gpus_hidden, progress
from colossalai.device.measure import KINDS, Timing, measure_axis
from colossalai.launchers import launch_from_torch
from colossalai.mesh import Mesh
from colossalai.testing import RankError, spawn

_CPU_RANKS = 2
_TIMING = Timing(warmup=3, repeat=10, latency_iters=20, sizes=(2**20, 2**22, 2**24))
_TIMEOUT = 300.0


@dataclass(frozen=True)
class LinkRow:
    """One collective on one axis: seconds of latency, and bytes per second that a rank sends."""

    axis: str
    ranks: int
    collective: str
    latency: float
    bandwidth: float


def check_bandwidth(ranks: int | None, device: str) -> None:
    """Measure and print; in a job, every rank comes here."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        if ranks is not None:
            raise click.UsageError(f"--ranks {ranks}: this is a job of {world} ranks already; leave it out")
        _in_job(device)
        return
    device, ranks = _choose(device, ranks)
    with tempfile.TemporaryDirectory(prefix="colossalai-check-") as folder, gpus_hidden(device):
        ticks = Path(folder) / "ticks"
        ticks.touch()
        with progress(ticks, len(KINDS)):
            try:
                found = spawn(measure_ranks, ranks, timeout=_TIMEOUT, device=device, ticks=str(ticks))
            except RankError as error:
                raise click.ClickException(str(error).partition("\n")[0]) from error
    click.echo(table(found[0], device))


def _in_job(device: str) -> None:
    if device == "auto":  # NCCL wants a GPU for each rank
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= here else "cpu"
    rows = measure_ranks(int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"]), 0, device=device)
    if os.environ.get("RANK", "0") == "0":
        click.echo(table(rows, device))


def _choose(device: str, ranks: int | None) -> tuple[str, int]:
    """The kind and the number of devices that the options mean on this machine."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if present > 1 else "cpu"
    if device == "cpu":
        return device, ranks or _CPU_RANKS
    if present < (ranks or 2):
        raise click.ClickException(
            f"--device cuda: links of {ranks or 2} GPUs are asked for, and this machine has {present}; use"
            " --device cpu"
        )
    return device, ranks or present


def measure_ranks(
    rank: int, world_size: int, port: int, *, device: str, ticks: str | None = None
) -> list[LinkRow]:
    """Join the job and measure every collective on every axis; rank 0 adds a byte to ``ticks`` after each."""
    launch_from_torch({}, backend="nccl" if device == "cuda" else "gloo", verbose=False)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    axes = {"this machine": world_size}
    if per_node < world_size:
        if world_size % per_node:
            raise click.ClickException(
                f"{world_size} ranks are not a multiple of the {per_node} on this node; start equally many on"
                " each"
            )
        axes = {"between nodes": world_size // per_node, "within a node": per_node}
    mesh = Mesh(axes, device)
    rows = []
    for axis, ranks in axes.items():
        for kind in KINDS if ranks > 1 else ():
            alpha, beta = measure_axis(mesh, axis, kind, _TIMING)
            rows.append(LinkRow(axis, ranks, kind, alpha, 1 / beta))
            if ticks is not None and rank == 0:
                with Path(ticks).open("ab") as file:
                    file.write(b".")
    return rows


def table(rows: list[LinkRow], device: str) -> str:
    """One line for each axis and collective."""
    lines = [
        f"#### Bandwidth Report ({device}) ####",
        "",
        f"{'axis':16}{'ranks':>6}  {'collective':16}{'latency (us)':>14}{'bandwidth (GB/s)':>18}",
    ]
    for row in rows:
        figures = f"{row.latency * 1e6:>14.1f}{row.bandwidth / 1e9:>18.3f}"
        lines.append(f"{row.axis:16}{row.ranks:>6}  {row.collective:16}{figures}")
    return "\n".join(
        [
            *lines,
            "",
            "bandwidth: what each rank sends in a second, with the ring algorithm",
            "latency: of a call with a few bytes",
        ]
    )
