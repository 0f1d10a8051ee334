"""The same script under five launchers: all print the same ranks, groups and all-reduce results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import environment_with_package, free_port, run
from tests.launch_real import services

REPORT = Path(__file__).parent / "report.py"

# world of 4 with pipeline=2 and tensor=2 (api.md 1.1: data outermost, then pipeline, then tensor)
GROUPS = {
    "global": [[0, 1, 2, 3]],
    "data": [[0], [1], [2], [3]],
    "model": [[0, 1, 2, 3]],
    "pipe": [[0, 2], [1, 3]],
    "tensor": [[0, 1], [2, 3]],
    "1d": [[0, 1], [2, 3]],
}


def expected() -> list[dict[str, Any]]:
    def view(rank: int) -> dict[str, Any]:
        mine = {mode: next(group for group in groups if rank in group) for mode, groups in GROUPS.items()}
        return {
            mode: {"ranks": group, "sum": float(sum(2**r for r in group))} for mode, group in mine.items()
        }

    return [{"rank": rank, "groups": view(rank)} for rank in range(4)]


def check(output: str) -> None:
    (line,) = [line for line in output.splitlines() if "REPORT " in line]
    assert json.loads(line.split("REPORT ")[1]) == expected()


def check_other(command: Sequence[object], env: dict[str, str] | None = None) -> None:
    environment = {**environment_with_package(), "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


def test_colossalai_run() -> None:
    result = run("run", "--nproc_per_node", 4, "--master_port", free_port(), REPORT, "--launcher", "torch")
    assert (result.code, result.survivors) == (0, {}), result
    check(result.out)


def test_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 4]
    check_other([*torchrun, "--master_port", free_port(), REPORT, "--launcher", "torch"])


def test_openmpi() -> None:
    if reason := services.missing("mpirun"):
        pytest.skip(reason)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 4, sys.executable]
    check_other([*mpirun, REPORT, "--launcher", "openmpi", "--port", free_port()])


def test_slurm(slurm: dict[str, str]) -> None:
    srun = ["srun", "-n", 4, "--overcommit", sys.executable]
    check_other([*srun, REPORT, "--launcher", "slurm", "--port", free_port()], env=slurm)


def test_two_hosts_over_ssh(ssh: dict[str, str]) -> None:
    first, second = services.SSH_HOSTS
    options = ["--nproc_per_node", 2, "--host", f"{first},{second}", "--master_addr", first]
    ports = ["--ssh-port", ssh["TEST_SSH_PORT"], "--master_port", free_port()]
    result = run("run", *options, *ports, REPORT, "--launcher", "torch", env=ssh)
    assert (result.code, result.survivors) == (0, {}), result
    check(result.out)
    end = [
        "====== Training on All Nodes =====",
        f"{first}: success",
        f"{second}: success",
        "",
        "====== Stopping All Nodes =====",
        f"{first}: finish",
        f"{second}: finish",
    ]
    assert result.out.splitlines()[-len(end) :] == end
