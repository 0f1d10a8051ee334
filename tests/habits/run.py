"""One column of the table in one job of two ranks; a cell that breaks the job is written down, and the rest
goes on in a new one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import colossalai
from colossalai.testing import RankError, spawn
from tests.habits.habit import all_habits
from tests.habits.judge import CRASHED, EQUAL, HANG, REFUSED, Cell, normal, report, run_script, verdict
from tests.habits.plans import PLANS, Boosted, Engined, Planned
from tests.habits.script import Script

RANKS = 2
PATIENCE = 60.0  # seconds for a cell, which takes a tenth of one; a cell that takes longer hangs
LONELY = 8.0  # seconds that a rank which has refused waits for the others; then it ends, as a script does
_STUCK, _LEFT = 97, 98  # exit codes


def run_column(plan: str, door: str, names: Sequence[str]) -> dict[str, Cell]:
    """The cells of a column at a door (``"booster"`` or ``"engine"``)."""
    cells: dict[str, Cell] = {}
    while left := [name for name in names if name not in cells]:
        with tempfile.TemporaryDirectory() as folder:
            failure = None
            try:
                spawn(_ranks, RANKS, timeout=600, plan=plan, door=door, names=left, folder=folder)
            except RankError as error:
                failure = error
            cells |= _read(Path(folder), failure)
    return cells


def _read(folder: Path, failure: RankError | None) -> dict[str, Cell]:
    journal = folder / "journal"
    entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    cells = {e["name"]: Cell(e["outcome"], e["words"]) for e in entries if "outcome" in e}
    if failure is None:
        return cells
    begun = [e["name"] for e in entries if e["name"] not in cells]
    if not begun:
        raise failure
    alone = [e for e in entries if e["name"] == begun[-1] and "alone" in e]
    if alone:
        return cells | {begun[-1]: Cell(REFUSED, f"on one rank, which ends the job: {alone[0]['alone']}")}
    stuck = f"exit code {_STUCK}" in str(failure)
    words = "" if stuck else str(failure)[-2000:]
    return cells | {begun[-1]: Cell(HANG if stuck else CRASHED, words)}


def _ranks(
    rank: int, world_size: int, port: int, plan: str, door: str, names: Sequence[str], folder: str
) -> None:
    config = PLANS[plan].config if door == "booster" else PLANS[plan].engine_config
    assert config is not None
    colossalai.launch(dict(config), rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    group = dist.new_group(backend="gloo")  # what the ranks say of cells does not mix with what cells say
    habits, journal = all_habits(), Path(folder) / "journal"
    for name in names:
        if rank == 0:
            _write(journal, {"name": name})
        alarm = threading.Timer(PATIENCE, os._exit, [_STUCK])
        alarm.daemon = True
        alarm.start()
        cell = _run_cell(habits[name], plan, door, Path(folder), group)
        alarm.cancel()
        if rank == 0:
            _write(journal, {"name": name, "outcome": cell.outcome, "words": cell.words})
        if cell.outcome == CRASHED or (habits[name].breaks and cell.outcome != EQUAL):
            return  # messages may be under way


def _write(journal: Path, entry: dict[str, str]) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _leave(journal: Path, name: str, words: str) -> None:
    _write(journal, {"name": name, "alone": words})
    os._exit(_LEFT)


def _run_cell(habit: Any, plan: str, door: str, base: Path, group: Any) -> Cell:
    folder = base / habit.name
    own = folder / "serial" / str(dist.get_rank())
    own.mkdir(parents=True)
    shared = folder / "plan"
    shared.mkdir(exist_ok=True)
    serial = Script(habit, own)
    torch.manual_seed(3)
    first = run_script(serial)
    torch.manual_seed(3)
    planned: Planned = (Boosted if door == "booster" else Engined)(habit, shared, PLANS[plan])
    second = run_script(planned)
    mine = report(habit, plan, serial, planned, (first, second))
    reports: list[Any] = [None] * dist.get_world_size()
    words = normal(mine.error[1]) if mine.error is not None and mine.is_ours else ""
    alarm = threading.Timer(LONELY, _leave, [base / "journal", habit.name, words])
    alarm.daemon = True
    if words:
        alarm.start()
    dist.all_gather_object(reports, mine, group=group)
    alarm.cancel()
    means = [s.value for s in serial.seen if s.kind == "mean"]
    cell = verdict(reports, means, PLANS[plan].kind == "pipeline")
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return cell


if __name__ == "__main__":  # python -m tests.habits.run PLAN[,PLAN] [engine] [NAME ...]
    plans, *rest = sys.argv[1:]
    door = "engine" if "engine" in rest else "booster"
    chosen = [name for name in rest if name != "engine"] or list(all_habits())
    for plan in PLANS if plans == "all" else plans.split(","):
        for name, cell in run_column(plan, door, chosen).items():
            print(f"{plan:12} {name:40} {cell.outcome:10} {cell.words[:1500]}", flush=True)
