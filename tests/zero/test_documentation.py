"""docs/source/en/zero.md promises that its Python runs; and the wrappers that it names."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.mesh import own_grad
from colossalai.testing import spawn
from colossalai.zero import LowLevelZeroOptimizer, zero_model_wrapper, zero_optim_wrapper

PAGE = Path(__file__).parents[2] / "docs/source/en" / "zero.md"


def run_page(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    namespace: dict[str, Any] = {"__name__": "documentation"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    assert isinstance(namespace["optimizer"], LowLevelZeroOptimizer)


def test_the_page_runs(tmp_path: Path) -> None:
    spawn(run_page, 2, folder=tmp_path)


def test_wrappers() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="zero_stage=4"):
        zero_model_wrapper(model, zero_stage=4)
    with pytest.raises(ValueError, match="gemini_config for stage 3 only"):
        zero_model_wrapper(model, 1, {"device": "cpu"})
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="needs the model that zero_model_wrapper returned"):
        zero_optim_wrapper(model, adam)
    assert zero_model_wrapper(model, 2) is model
    with pytest.raises(ValueError, match="sets partition_grad by the stage of the model"):
        zero_optim_wrapper(model, adam, optim_config={"partition_grad": True})
    optimizer = zero_optim_wrapper(model, adam, max_norm=0.1, optim_config={"cpu_offload": True})
    optimizer.backward(model(torch.ones(1, 3)).sum())
    assert own_grad(model.weight) is None  # stage 2 keeps shards only
    optimizer.step()
    assert optimizer.grad_norm is not None
