"""Models with experts under the plugins of a booster: losses, loads and weights of the serial model, also
when they are saved under one plan and loaded under another.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.testing import spawn
from tests.nn.layer.moe.training import Task, Trained, build, by_booster, compare, launch, serial, sgd
from tests.rows.plans import PLUGINS

TASKS = {"plain": Task(), "top1-clip": Task(k=1, capacity=0.8, clip=True), "full": Task(recompute="full")}
TP, SP = {"tensor": {"size": 2, "mode": "1d"}}, {"sequence": 2}
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "ep2": ({"moe": 2}, 2),
    "dp2-ep2": ({"moe": 2}, 4),
    "ep4": ({"moe": 4}, 4),
    "ep2-tp2": ({"moe": 2, **TP}, 4),
    "ep2-sp2": ({"moe": 2, **SP}, 4),
}


@cache
def expected(name: str) -> Trained:
    return serial(TASKS[name])


def grid() -> list[Any]:
    cases = []
    for i, plugin in enumerate(name for name in PLUGINS if name != "fsdp"):
        for j, plan in enumerate(PLANS):
            for k, task in enumerate(TASKS):
                marks = () if (i + j + k) % 3 == 0 and (i + j) % 2 == 0 else pytest.mark.slow
                cases.append(pytest.param(plugin, plan, task, id=f"{plugin}-{plan}-{task}", marks=marks))
    return cases


def _train(plugin: str, plan: str, name: str, want: Trained, folder: str, **place: Any) -> None:
    launch(TASKS[name], PLANS[plan][0])
    got = by_booster(TASKS[name], PLUGINS[plugin], Path(folder))
    # float32, where decisions at the border of two experts may differ in later steps
    compare(got, want, rtol=1e-4, loads=not TASKS[name].recompute)


@pytest.mark.parametrize(("plugin", "plan", "task"), grid())
def test_plugins(plugin: str, plan: str, task: str, tmp_path: Path) -> None:
    spawn(partial(_train, plugin, plan, task, expected(task), str(tmp_path)), PLANS[plan][1])


def _refused(**place: Any) -> None:
    launch(Task(), {"moe": 2})
    model = build(Task())
    with pytest.raises(
        ValueError, match=r"TorchFSDPPlugin divides or averages all parameters .* 1.moe.experts.w1"
    ):
        Booster(plugin=TorchFSDPPlugin(), device="cpu").boost(model, sgd(model.parameters()))
    with pytest.raises(ValueError, match="without a plugin nothing would average them"):
        Booster(device="cpu").boost(model, sgd(model.parameters()))


def test_what_cannot_train_experts_is_refused_on_every_rank() -> None:
    spawn(_refused, 2)


def _write(folder: str, **place: Any) -> None:
    launch(Task(), {"moe": 2})
    by_booster(Task(), PLUGINS["zero2"], Path(folder), run="run")


def _read(folder: str, plugin: str, parallel: dict[str, Any], **place: Any) -> None:
    launch(Task(), parallel)
    model = build(Task()).float()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    booster = Booster(plugin=PLUGINS[plugin](), device="cpu")
    boosted, *_ = booster.boost(model, sgd(model.parameters()))
    booster.load(Path(folder) / "run")
    path = Path(folder) / f"again-{plugin}.bin"
    booster.save_model(boosted, path)
    dist.barrier()
    written = torch.load(Path(folder) / "model.bin", weights_only=True)
    again = torch.load(path, weights_only=True)
    assert written.keys() == again.keys()
    for name, value in written.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize(
    ("plugin", "parallel", "ranks"),
    [("gemini", {"moe": 4}, 4), ("ddp", {"moe": 2, **TP}, 4), ("zero1", {}, 2)],
    ids=["gemini-ep4", "ddp-ep2-tp2", "zero1-dp2"],
)
def test_checkpoints_reload_under_another_plan(
    plugin: str, parallel: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    spawn(partial(_write, str(tmp_path)), 2)
    spawn(partial(_read, str(tmp_path), plugin, parallel), ranks)
