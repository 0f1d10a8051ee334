"""The table of page 48: the memory of each GPU as documented, as predicted and as measured.

    python memory_table.py                  predict and print
    python memory_table.py --measure 2 3    on a GPU: also train 3 steps of the configs for up to 2 processes
    python memory_table.py --write          also into docs/source/en/gpt.md

What was measured is kept in ``measured.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from dry_run_gpt import play

from colossalai.context import Config
from colossalai.dry_run import RankReport
from titans.utils.scripts import script_parser

HERE = Path(__file__).parent
MEASURED = HERE / "measured.json"
PAGE = HERE.parents[2] / "docs/source/en" / "gpt.md"
BEGIN, END = "<!-- memory table: begin -->", "<!-- memory table: end -->"
MIB = 2**20


class Case(NamedTuple):
    """A row of the documented table."""

    config: str
    processes: int
    documented: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.config} x {self.processes}"


CASES = (
    Case("gpt2_vanilla", 1, (6071,)),
    Case("gpt2_vanilla", 2, (6637, 6637)),
    Case("gpt2_1d", 2, (6269, 6269)),
    Case("gpt2_2d", 4, (6061, 6143, 6167, 6057)),
    Case("gpt2_2p5d", 2, (6335, 6347)),
    Case("gpt2_3d", 8, (6139, 6065, 6167, 6077, 6167, 6077, 6167, 6035)),
    Case("gpt2_pp", 2, (5483, 5877)),
    Case("gpt2_zero2", 1, (4485,)),
    Case("gpt2_zero3", 1, (4701,)),
    Case("gpt2_nvme", 1, (5067,)),
    Case("gpt2_pp1d", 8, (4555, 4571, 5537, 5517, 4555, 4571, 5537, 5517)),
)


def file_of(case: Case) -> Path:
    return HERE / "gpt2_configs" / f"{case.config}.py"


def predict(case: Case) -> list[int]:
    """Bytes of each rank; all data-parallel replicas need the same."""
    reports: list[RankReport] = play(Config.from_file(file_of(case)), case.processes)
    peaks = [report.memory.peak for report in reports]
    return peaks * (case.processes // len(peaks))


def measure(case: Case, steps: int) -> list[int]:
    """Bytes of each rank, by training; ranks share a GPU where there are not enough."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "peaks.json"
        backend = "nccl" if case.processes <= torch.cuda.device_count() else "gloo"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={case.processes}", str(HERE / "train_gpt.py"), "--from_torch", "-s"]
        command += [f"--config={file_of(case)}", f"--max_steps={steps}", "--backend", backend]
        path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [*command, "--report", str(report)], check=True, env={**os.environ, "PYTHONPATH": path}
        )
        peaks: list[int] = json.loads(report.read_text())
        return peaks


def table(predictions: dict[str, list[int]], measured: dict[str, list[int]]) -> str:
    """In Markdown; equal numbers of several GPUs are written once."""
    lines = [
        "| config | GPUs | batch size | published MiB of each GPU | predicted MiB | measured MiB |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        batch = Config.from_file(file_of(case)).BATCH_SIZE
        own = [_mib(found.get(case.key, [])) for found in (predictions, measured)]
        cells = [case.config, case.processes, batch, _short(case.documented), *map(_short, own)]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def _mib(peaks: list[int]) -> tuple[int, ...]:
    return tuple(round(peak / MIB) for peak in peaks)


def _short(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f"{numbers[0]} each"
    return ", ".join(map(str, numbers))


def read_measured() -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return found


def write_into(page: str, text: str) -> str:
    """``page`` with ``text`` in the place of its table."""
    return re.sub(f"(?s){BEGIN}.*{END}", f"{BEGIN}\n\n{text}\n\n{END}", page)


def parse_args() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--measure", type=int, nargs=2, metavar=("PROCESSES", "STEPS"), help="train on GPUs")
    parser.add_argument("--write", action="store_true", help="put the table into docs/source/en/gpt.md")
    args = parser.parse_args()
    if args.measure is not None and not torch.cuda.is_available():
        parser.error("--measure needs a GPU")
    return args


def main() -> None:
    args = parse_args()
    measured = read_measured()
    if args.measure is not None:
        most, steps = args.measure
        for case in (case for case in CASES if case.processes <= most):
            try:
                measured[case.key] = measure(case, steps)
            except subprocess.CalledProcessError as error:
                # its ranks have said why; the others are still of use
                print(f"{case.key} was not measured: exit code {error.returncode}", flush=True)
                continue
            MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    text = table({case.key: predict(case) for case in CASES}, measured)
    print(text)
    if args.write:
        PAGE.write_text(write_into(PAGE.read_text(), text))


if __name__ == "__main__":
    main()
