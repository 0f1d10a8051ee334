"""Plans by name and from files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from colossalai.booster import Accelerator, Booster
from colossalai.booster.plans import PLANS
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context.config import ConfigException
from colossalai.launchers import launch_from_torch
from colossalai.testing import spawn


def _names(rank: int, world_size: int, port: int, folder: str) -> None:
    launch_from_torch({}, backend="gloo")
    kinds = {name: type(Booster(plugin=name).plugin) for name in PLANS}
    devices = {name: Booster(plugin=name).accelerator.device for name in PLANS}
    assert set(devices.values()) == {Accelerator().device}, devices  # every plan says where inputs go
    assert kinds["ddp"] is kinds["torch_ddp"] is TorchDDPPlugin
    assert kinds["fsdp"] is TorchFSDPPlugin
    assert kinds["zero1"] is kinds["zero2_cpu"] is LowLevelZeroPlugin
    assert kinds["gemini"] is kinds["zero3"] is kinds["gemini_auto"] is GeminiPlugin

    def plugin(given: Any) -> Any:
        return Booster(plugin=given).plugin

    assert [plugin(name).stage for name in ("zero1", "ZeRO2")] == [1, 2]
    assert plugin({"plugin": "gemini", "max_norm": 2.5}).optimizer_options["clipping_norm"] == 2.5
    assert plugin({"plugin": "gemini_auto"}).model_options["placement_policy"] == "auto"
    booster = Booster(plugin=str(Path(folder) / "plan.yaml"))
    assert booster.plugin.optimizer_options["clipping_norm"] == 0.5  # type: ignore[union-attr]
    assert booster.plugin.precision == "bf16"  # type: ignore[union-attr]
    assert plugin(Path(folder) / "plan.py").stage == 2
    with pytest.raises(ValueError, match=r"got mixed_precision='fp16', and its plan has 'bf16'; keep one"):
        Booster(mixed_precision="fp16", plugin=str(Path(folder) / "plan.yaml"))


def test_plans_are_made_by_name_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("plugin: gemini\nmax_norm: 0.5\nmixed_precision: bf16\n")
    (tmp_path / "plan.py").write_text("plugin = 'zero2'\n")
    spawn(_names, 1, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("zero4", r"does not know the plan 'zero4'; it is one of 'ddp', .*'gemini'"),
        ({"plugin": 3}, "does not know the plan 3"),
        ({"plugin": "zero2", "placement_policy": "cpu"}, "placement_policy='cpu' does not go with the plan"),
        ({"plugin": "zero2", "stage": 1}, "stage=1 does not go with the plan 'zero2'"),
        ({"parallel": {}}, r"needs the key 'plugin'.*are for initialize, not for Booster"),
    ],
)
def test_wrong_plans_are_refused(plan: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Booster(plugin=plan)


def test_wrong_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no config file 'none\.yaml'"):
        Booster(plugin="none.yaml")
    file = tmp_path / "plan.yml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigException, match="must hold one mapping"):
        Booster(plugin=file)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigException, match="pip install pyyaml"):
        Booster(plugin=file)
