"""The script of hybrid.md prints the losses that the page shows, under every plan of its table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from colossalai.testing import parametrize_sample
from docs.pages import ENGLISH, Page
from docs.test import run

PAGE = Page.read(ENGLISH / "hybrid.md")
ROWS = re.findall(r"^\| .* \| `(dict\(.*\))` \| (\d) \|$", PAGE.text, re.MULTILINE)
OWN = 'dict(pipeline=2, tensor=dict(size=2, mode="1d"))'


def test_the_table() -> None:
    assert len(ROWS) == 8
    assert f"PARALLEL = {OWN}" in PAGE.text
    assert PAGE.commands == ["colossalai run --nproc_per_node 4 train.py"]
    assert (OWN, "4") in ROWS


@parametrize_sample("plan, nprocs", ROWS, n=4)
def test_every_plan_prints_the_losses_of_the_page(plan: str, nprocs: str, tmp_path: Path) -> None:
    text = PAGE.text.replace(f"PARALLEL = {OWN}", f"PARALLEL = {plan}")
    run(replace(PAGE, text=text.replace("node 4 train.py -->", f"node {nprocs} train.py -->")), tmp_path)
