"""booster.md promises that its Python runs, and that its plugin is equal to the serial model."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.testing import spawn
from colossalai.testing.parity import check_plan
from tests.booster.plans import PluginRun, problem

PAGE = Path(__file__).parents[2] / "docs/source/en" / "booster.md"


def _run(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 7
    # of a training that the page does not spell out; tests/booster/test_averages.py runs these lines
    namespace: dict[str, Any] = {"__name__": "documentation", "training": [], "evaluate": lambda: None}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    assert namespace["numbers"] == [[0 + rank, 2 + rank], [4 + rank, 6 + rank], [8 + rank]]
    assert namespace["from_file"].plugin.model_options["placement_policy"] == "auto"
    assert namespace["optimizer"].param_groups[0]["lr"] < 1e-2
    assert (folder / "checkpoint/model/model.safetensors.index.json").is_file()
    check_plan(problem(), lambda made: PluginRun(made, namespace["AveragingPlugin"]()))
    _averages_gradients_of_half_weights(rank, namespace["AveragingPlugin"]())


def _averages_gradients_of_half_weights(rank: int, plugin: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    raw = torch.optim.AdamW(
        model.parameters(), lr=0.1
    )  # gets masters, which have no gradient before the step
    booster = Booster("cpu", BF16MixedPrecision(half_weights=True), plugin)
    model, optimizer, *_ = booster.boost(model, raw)  # type: ignore[assignment]
    assert list(map(id, optimizer.trained_parameters())) == list(map(id, model.parameters()))
    for _ in range(3):
        torch.manual_seed(rank)
        booster.backward(model(torch.randn(4, 8)).float().square().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    both = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(both, model.weight.detach())
    assert torch.equal(*both)


def test_the_page_runs(tmp_path: Path) -> None:
    (plan,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "plan.yaml").write_text(plan)
    spawn(_run, 2, folder=tmp_path)
