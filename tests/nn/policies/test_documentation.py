"""parallelize.md promises that its Python runs, and lists the rules and the architectures that there
are.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import colossalai
from colossalai.nn import policies
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

PAGE = (Path(__file__).parents[3] / "docs/source/en" / "parallelize.md").read_text()


def _run(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {"__name__": "documentation"}
    first = None
    for block in blocks:
        exec(compile(block, "parallelize.md", "exec"), namespace)
        first = first or namespace["loss"].item()
    ids = namespace["ids"]
    assert namespace["model"](input_ids=ids, labels=ids).loss.item() < first
    assert namespace["model"].lm_head.weight.shape[0] == 49 - rank
    assert namespace["mlp"].up.weight.shape == (32, 16)


def test_the_page_runs(tmp_path: Path) -> None:
    spawn(_run, 2, folder=tmp_path)


def test_the_tables_are_complete() -> None:
    rules = set(policies.__all__) - {"POLICIES", "Policy", "Rule", "parallelize"}
    assert [name for name in rules if f"{name}(" not in PAGE] == []
    kinds = [kind for policy in policies.POLICIES for kind in policy.model_types]
    table = PAGE[PAGE.index("| model_type") : PAGE.index("- In 1D, modules")]
    assert [kind for kind in kinds if kind not in table] == []
