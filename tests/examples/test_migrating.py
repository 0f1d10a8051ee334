"""The script of docs/source/en/migrating.md runs as it is printed there; what it calls by name exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colossalai.booster.plans import PLANS
from colossalai.testing import spawn
from tests.examples.test_fine_tuning import programs, run_program

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

PAGE = Path(__file__).parents[2] / "docs/source/en" / "migrating.md"


def test_the_script(tmp_path: Path) -> None:
    (script,) = programs(PAGE)
    spawn(run_program, 2, program=script, folder=str(tmp_path))
    words = (tmp_path / "out0").read_text().split()
    assert float(words[-1]) < 0.5 * float(words[2].rstrip(","))
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 25))  # 256 samples, 2 ranks of 8, 2 passes a step, 3 epochs
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "trained")


def test_the_plans_of_the_table_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    named = {name for name in PLANS if any(f'"{name}"' in row for row in rows)}
    assert named == PLANS.keys() - {"torch_ddp", "torch_fsdp"}
