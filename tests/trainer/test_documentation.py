"""docs/source/en/engine.md and docs/source/en/trainer.md promise that their Python runs."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from tests.engine.plans import logged

DOCS = Path(__file__).parents[2] / "docs/source/en"


def _run_page(name: str, count: int) -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    assert len(blocks) == count
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    return namespace


def _run(rank: int, world_size: int, port: int, folder: Path) -> list[str]:
    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    names = _run_page("engine.md", 4)
    assert names["lr_scheduler"].get_last_lr()[0] < 0.1
    gpc.destroy()
    with logged() as messages:
        names = _run_page("trainer.md", 5)
    assert names["trainer"].cur_epoch == 2
    assert names["early"].best_epoch is not None
    assert '"Accuracy/test": ' in Path("metrics.jsonl").read_text()
    assert sorted(p.name for p in Path("ckpt").iterdir()) == ["epoch_0.pt", "epoch_1.pt", "epoch_2.pt"]
    return messages


def test_the_pages_run(tmp_path: Path) -> None:
    first, second = spawn(_run, 2, folder=tmp_path)
    for start in ("[Epoch 2 / Test]: Loss = ", "[Epoch 0 / Train]: Train-epoch: last = "):
        assert any(m.startswith(start) for m in first), start
    assert any(
        re.match(r"\[Epoch 1 / Train\]: Loss = \S+ \| Accuracy = \S+ \| LR = \S+ \| Throughput = ", m)
        for m in first
    )
    assert "training starts" in first
    assert any(re.match(r"stopped after epoch \d, best in \d", m) for m in first)
    assert [m.split(":")[0] for m in first if m.startswith("step ")] == ["step 3", "step 6"]
    assert not any(m.startswith("[Epoch") for m in second)
