"""``from_pretrained``, any plan, ``save_pretrained``, ``from_pretrained``: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.checkpoint_io.files import pretrained
from colossalai.core import global_context as gpc
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies import zoo  # noqa: E402

FAMILIES = ("gpt2", "llama", "bert", "t5", "vit")


def _gemini(policy: str) -> Plugin:
    return GeminiPlugin(device="cpu", precision="fp32", placement_policy=policy)


PLUGINS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero-1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero-2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "gemini cpu": lambda: _gemini("cpu"),
    "gemini auto": lambda: _gemini("auto"),
}
# the parallel section of a job of four ranks, how its model is cut, and the plugins that go around it
JOBS: list[tuple[dict[str, Any], Callable[[nn.Module], nn.Module], tuple[str, ...]]] = [
    ({}, lambda model: model, tuple(PLUGINS)),
    (
        {"tensor": {"size": 2, "mode": "1d"}},
        parallelize,
        ("not boosted", "ddp", "zero-2", "gemini cpu", "fsdp"),
    ),
    ({"tensor": {"size": 4, "mode": "2d"}}, parallelize, ("not boosted", "none")),
    ({"pipeline": 2}, split_model, ("not boosted", "ddp", "zero-1", "gemini cpu", "fsdp")),
    ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, split_model, ("not boosted", "ddp")),
]


def _planned(model: nn.Module, name: str) -> nn.Module:
    if name == "not boosted":
        return model
    booster = Booster(device=None if "gemini" in name else "cpu", plugin=PLUGINS[name]())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return booster.boost(model, optimizer).model


def _compare(serial: nn.Module, folder: Path, what: str) -> None:
    again = type(serial).from_pretrained(folder)  # type: ignore[attr-defined]
    expected, found = serial.state_dict(), again.state_dict()
    assert expected.keys() == found.keys(), what
    lost = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not lost, f"{what}: {lost}"


def check_round_trips(rank: int, world_size: int, port: int, folder: Path) -> None:
    serial = {name: zoo.build(name).eval() for name in FAMILIES}
    seen = 0  # another family each time
    for parallel, cut, plugins in JOBS:
        config = {"parallel": parallel, "NUM_MICRO_BATCHES": 2} if parallel else {}
        colossalai.launch_from_torch(config, backend="gloo", verbose=False)
        for number, plugin in enumerate(plugins):
            family = FAMILIES[(seen + number) % len(FAMILIES)]
            what = f"{parallel}, {plugin}, {family}"
            if rank == 0 and not (folder / family).exists():
                serial[family].save_pretrained(folder / family)  # type: ignore[operator]
            dist.barrier()
            model = cut(type(serial[family]).from_pretrained(folder / family))  # type: ignore[attr-defined]
            model = _planned(model, plugin)
            colossalai.save_pretrained(model, folder / what)
            if rank == number % world_size:  # whichever: all have waited until it was written
                _compare(serial[family], folder / what, what)
        seen += len(plugins)
        gpc.destroy()


def test_the_bits_come_back_under_every_plan(tmp_path: Path) -> None:
    spawn(check_round_trips, 4, folder=tmp_path)


def check_chunks(rank: int, world_size: int, port: int, folder: Path) -> None:
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2, "model": {"num_chunks": 2}}
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)
    torch.manual_seed(0)
    serial = zoo.gpt2(n_layer=4)
    torch.manual_seed(0)
    stages = split_model(zoo.gpt2(n_layer=4))
    assert isinstance(stages, nn.ModuleList)
    assert len(stages) == 2
    for stage in stages:
        with pytest.raises(RuntimeError, match=r"call colossalai.save_pretrained\(model, folder\) on every"):
            stage.save_pretrained(folder)  # type: ignore[operator]
    for name in ("not boosted", "none"):
        colossalai.save_pretrained(_planned(stages, name), folder / name)
        _compare(serial, folder / name, name)
    with pytest.raises(TypeError, match=r"needs a model that has this method.*got a Linear.*save_model"):
        colossalai.save_pretrained(nn.Linear(2, 2), folder)


def test_several_stages_of_a_rank(tmp_path: Path) -> None:
    spawn(check_chunks, 2, folder=tmp_path)


def check_wrappers(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Torch's own wrappers; and every rank hears of it if the one that writes fails."""
    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    serial = zoo.build("gpt2")
    for name, model in (
        ("ddp", nn.parallel.DistributedDataParallel(zoo.build("gpt2"))),
        ("compiled", torch.compile(zoo.build("gpt2"))),
        ("fully_shard", torch.distributed.fsdp.fully_shard(zoo.build("gpt2"))),
    ):
        colossalai.save_pretrained(model, folder / name, max_shard_size="4KB")  # type: ignore[arg-type]
        _compare(serial, folder / name, name)
        assert len(list((folder / name).glob("*.safetensors"))) > 1
    before = pretrained.native_class
    if rank == 0:
        pretrained.native_class = lambda _: type("Full", (), {"save_pretrained": _no_space})
    with pytest.raises((OSError, RuntimeError), match=r"no space left"):
        colossalai.save_pretrained(serial, folder / "full")
    pretrained.native_class = before


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_wrappers_of_torch_and_a_full_disk(tmp_path: Path) -> None:
    spawn(check_wrappers, 2, folder=tmp_path)
