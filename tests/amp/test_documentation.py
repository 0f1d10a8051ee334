"""docs/source/en/mixed_precision.md promises that its Python runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from colossalai.amp.apex_amp import LEVELS
from colossalai.amp.naive_amp import NaiveAMPOptimizer
from colossalai.amp.scaled_optimizer import ScaledOptimizer
from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.interface import OptimizerWrapper

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "mixed_precision.md").read_text()


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    optimizers = []
    for block in blocks:
        namespace: dict[str, Any] = {"__name__": "documentation"}
        exec(compile(block, "mixed_precision.md", "exec"), namespace)
        optimizers.append(namespace["optimizer"])
    kinds = [type(optimizer) for optimizer in optimizers]
    assert kinds == [NaiveAMPOptimizer, OptimizerWrapper, TorchAMPOptimizer]
    scaled = [optimizer for optimizer in optimizers if isinstance(optimizer, ScaledOptimizer)]
    assert [optimizer.loss_scale for optimizer in scaled] == [2**12, 2**10]
    assert not any(optimizer.step_was_skipped for optimizer in scaled)


def test_the_page_names_every_precision_and_level() -> None:
    for name, kind in PRECISIONS.items():
        assert f'| `"{name}"` | `{kind.__name__}` |' in PAGE
    for level in LEVELS:
        assert f'| `"{level}"' in PAGE
