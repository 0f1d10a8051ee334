"""Families of transformers, and models of timm and torchvision, under every plan, built in a
``LazyInitContext`` and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.interface import user_module
from colossalai.lazy import LazyInitContext
from colossalai.mesh.weights.deferred import recording_in
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from tests.lazy import vision
from tests.nn.policies import families

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero2": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "gemini cpu": partial(GeminiPlugin, precision="fp32", placement_policy="cpu"),
    "gemini auto": partial(GeminiPlugin, precision="fp32", placement_policy="auto"),
}
SEED = 7


META = "meta "  # before the name of a family that is built on the plain meta device
STORED = "stored "  # before the name of a family whose weights from_pretrained reads


# Sizes that its config has by other names than most.
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}


def config(kind: str) -> Any:
    return families.config(kind, **(GPT2 if kind == "gpt2" else {}))


def builder(kind: str, folder: str) -> Callable[[], nn.Module]:
    """What builds a model of a family, by its constructor or from the files in ``folder``."""
    if kind in vision.MODELS:
        return vision.builder(kind)
    kind = kind.removeprefix(META)
    stored = kind.removeprefix(STORED)
    cls = families.model_class(stored)
    return (
        partial(cls, config(stored))
        if stored == kind
        else partial(cls.from_pretrained, Path(folder) / "stored")
    )


def store(kind: str, folder: str, rank: int) -> None:
    """Write a model of a family, in several files, for ``from_pretrained``."""
    if rank == 0:
        torch.manual_seed(3)
        model: Any = families.model_class(kind)(config(kind))
        model.save_pretrained(Path(folder) / "stored", max_shard_size="20KB")


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return make()


def lazily(kind: str, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    if kind.startswith(META):
        with torch.device("meta"):
            return make()
    with LazyInitContext(large=1):
        model = make()
    assert recording_in(model) is not None
    return model


def boosted(model: nn.Module, plugin: Plugin | None) -> tuple[Booster, nn.Module]:
    """``model`` as a script boosts it, with an optimizer of its parameters."""
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.is_floating_point()), lr=1e-3)
    found, *_ = booster.boost(model, optimizer)
    inner = user_module(found)
    assert recording_in(inner) is None
    return booster, found


def whole_state(booster: Booster, model: nn.Module, folder: str, rank: int) -> dict[str, Tensor] | None:
    """The serial state of a boosted model, on the first rank."""
    path = Path(folder) / "weights.pt"
    booster.save_model(model, path)
    return torch.load(path) if rank == 0 else None


def check_equal(found: dict[str, Tensor], serial: nn.Module, what: str) -> None:
    expected = serial.state_dict()
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        assert same(found[name], value), f"{what}: {name} is not that of the serial constructor"


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.nan_to_num() if one.is_floating_point() else one,
        other.nan_to_num() if other.is_floating_point() else other,
    )


def check_buffers(model: nn.Module, serial: nn.Module, what: str) -> None:
    """Also those that no checkpoint has; a stage lacks those of other stages."""
    expected = dict(serial.named_buffers())
    for name, value in model.named_buffers():
        assert same(value, expected[name]), f"{what}: the buffer {name}"


@torch.no_grad()
def check_output(model: nn.Module, serial: nn.Module, given: Tensor, what: str) -> None:
    """Also tensors that are attributes of modules have a part in it."""
    assert torch.equal(model.eval()(given), serial.eval()(given)), f"{what}: the output"


def outcome(kind: str, plan: str, folder: str, rank: int) -> str:
    """ "equal", or why the family has no such plan."""
    make, what = builder(kind, folder), f"{kind} under {plan}"
    serial, model = build(make), lazily(kind, make)
    try:
        if plan == "1d":
            model = parallelize(model)
        elif plan == "pipeline":
            model = split_model(model)
        booster, found = boosted(model, PLUGINS[plan]() if plan in PLUGINS else None)
    except ValueError as refusal:
        return str(refusal)
    check_buffers(user_module(found), serial, what)
    if (
        kind in vision.MODELS and plan in PLUGINS
    ):  # elsewhere sums are rounded otherwise, or a rank has a part
        check_output(found, serial, vision.images(kind), what)
    state = whole_state(booster, found, folder, rank)
    if state is not None:
        check_equal(state, serial, what)
    return "equal"


LAUNCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "data": ({}, list(PLUGINS)),
    "tensor": ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, ["1d"]),
    "pipeline": ({"parallel": {"pipeline": {"size": 2}}, "NUM_MICRO_BATCHES": 2}, ["pipeline"]),
}


def run_plans(
    rank: int, world_size: int, port: int, kinds: list[str], folder: str, launches: Iterable[str] = LAUNCHES
) -> dict[tuple[str, str], str]:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for kind in kinds:
        if kind.startswith(STORED):
            store(kind.removeprefix(STORED), folder, rank)
    found = {}
    for config, plans in map(LAUNCHES.__getitem__, launches):
        colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
        dist.barrier()  # the files are there
        found |= {(kind, plan): outcome(kind, plan, folder, rank) for kind in kinds for plan in plans}
        gpc.destroy()
    return found
