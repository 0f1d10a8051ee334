"""The Python of docs/tensor_parallel.md runs on four ranks, and prints what the page shows; its table is what is counted."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from benchmarks.linear_formulas import MATRIX, measure, rows, table
from colossalai.testing import spawn

PAGE = (Path(__file__).parents[2] / "docs" / "tensor_parallel.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    namespace: dict[str, object] = {"__name__": "documentation"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/tensor_parallel.md", "exec"), namespace)
    return out.getvalue()


def test_the_blocks_run_one_after_the_other_on_four_ranks() -> None:
    assert spawn(_run, 4)[0] == "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))


def test_the_table_is_what_is_counted_and_what_the_papers_say() -> None:
    assert table() in PAGE
    for row in rows():
        measured = [n / MATRIX for n in measure(row.tp)]
        assert measured == pytest.approx([row.weight, row.activation, row.moved], rel=1e-9), row.name
