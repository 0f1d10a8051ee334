"""The script of hybrid.md prints the losses that the page shows, under every plan of its table."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

from colossalai.core import global_context as gpc
from colossalai.testing import parametrize_sample, spawn

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "hybrid.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(SHOWN,) = re.findall(r"\$ colossalai run .*\n((?:step .*\n)+)```", PAGE)
ROWS = re.findall(r"^\| .* \| `(dict\(.*\))` \| (\d) \|$", PAGE, re.MULTILINE)
OWN = 'dict(pipeline=2, tensor=dict(size=2, mode="1d"))'


def run_script(rank: int, world_size: int, port: int, script: str) -> str:
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(script, "hybrid.md", "exec"), {"__name__": "page"})
    gpc.destroy()
    return out.getvalue()


def test_the_table() -> None:
    assert len(ROWS) == 8
    assert f"PARALLEL = {OWN}" in SCRIPT
    assert (OWN, "4") in ROWS


@parametrize_sample("plan, nprocs", ROWS, n=4)
def test_every_plan_prints_the_losses_of_the_page(plan: str, nprocs: str) -> None:
    script = SCRIPT.replace(f"PARALLEL = {OWN}", f"PARALLEL = {plan}")
    assert spawn(run_script, int(nprocs), script=script)[0] == SHOWN
