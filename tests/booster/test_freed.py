"""What was boosted goes when the script lets it go, under every plan and at both doors, while the booster
lives on.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world

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
from colossalai.nn.optimizer import HybridAdam
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing import spawn
from colossalai.testing.pipelined import cut
from tests.engine.plans import on_device
from tests.pipeline.plans import build as build_stages
from tests.pipeline.plans import config as pipeline_config
from tests.zero.gemini.runs import SMALL

OURS = ("gemini", "disk")  # how the names of our threads begin
CHUNKS = {"min_chunk_size_mb": 4 * SMALL, "search_range_mb": 4 * SMALL}


def on_disk() -> GeminiPlugin:
    options = {"host_capacity": 70_000, "disk_dir": tempfile.gettempdir(), **CHUNKS}
    return GeminiPlugin("cpu", "cpu", precision="fp32", **options)


PLUGINS: dict[str, Callable[[], Plugin | None]] = {
    "none": lambda: None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=True),
    "gemini": lambda: GeminiPlugin("cpu", "cpu", precision="bf16", **CHUNKS),
    "gemini cuda": lambda: GeminiPlugin("cpu", "cuda", precision="fp16", **CHUNKS),
    "gemini early": lambda: GeminiPlugin(
        "cpu", "auto", precision="fp32", update_in_backward=True, max_norm=1.0, **CHUNKS
    ),
    "gemini disk": on_disk,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "naive fp16": {"fp16": {"mode": colossalai.amp.AMP_TYPE.NAIVE}},
    "zero 2": {"zero": {"level": 2, "precision": "fp32"}},
    "gemini": {"zero": {"level": 3, "precision": "fp32", "placement_policy": "cpu"}},
    "accumulation": {"gradient_accumulation": 2, "clip_grad_norm": 1.0},
}


class Witness:
    """What must be gone: everything that a run has, its threads, files and process groups."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Any]] = []
        self.before = self._count()

    def see(self, *things: Any) -> None:
        for thing in things:
            self.alive.append(weakref.ref(thing))
            if isinstance(thing, nn.Module):
                self.alive += map(weakref.ref, thing.parameters())

    def _count(self) -> dict[str, int]:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith(OURS):
                thread.join(60)  # it has been told to end, by the garbage collector, which does not wait
        files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        return {"threads": threading.active_count(), "groups": len(_world.pg_map), "files": files}

    def check(self, what: str) -> None:
        after = self._count()
        left = [type(thing).__name__ for known in self.alive if (thing := known()) is not None]
        assert not left, f"{what}: {len(left)} are still there: {left[:5]}"
        assert after == self.before, f"{what}: {self.before} became {after}"


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])


def train(booster: Booster, witness: Witness | None = None, folder: Path | None = None) -> None:
    model = build()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if witness is not None:
        witness.see(model, optimizer, scheduler)
    boosted, stepped, _, _, timed = booster.boost(model, optimizer, lr_scheduler=scheduler)
    for _ in range(2):
        booster.backward(boosted(torch.ones(2, 32)).float().square().mean(), stepped)
        stepped.step()
        stepped.zero_grad()
        timed.step()  # type: ignore[union-attr]
    if folder is not None:
        booster.save(folder / "run")
        booster.load(folder / "run")
        booster.save_model(boosted, folder / "model.pt")
        booster.load_model(boosted, folder / "model.pt")
    if hasattr(boosted, "settle"):
        boosted.settle()  # an update that is under way holds its model
    if witness is not None:
        witness.see(boosted, stepped, timed)


def check_boosters(rank: int, world_size: int, port: int, names: list[str], folder: str) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    for name in names:
        booster = Booster(None if "gemini" in name else "cpu", plugin=PLUGINS[name]())
        where = Path(folder, name)
        train(booster, folder=where)  # what is made once stays: process groups of a plan
        witness = Witness()
        for _ in range(2):
            train(booster, witness, where)
        witness.check(name)
        with pytest.raises(RuntimeError, match="has boosted no model that still exists"):
            booster.save(where / "run")


def test_boosted_models_are_freed(tmp_path: Path) -> None:
    spawn(check_boosters, 2, names=list(PLUGINS), folder=str(tmp_path), timeout=180)


def check_engines(rank: int, world_size: int, port: int) -> None:
    for name, config in SECTIONS.items():
        if not dist.is_initialized():
            colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
        gpc.load_config(config)
        engine_step(None)
        witness = Witness()
        for _ in range(2):
            engine_step(witness)
        witness.check(name)


def engine_step(witness: Witness | None) -> None:
    model = build()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
    for _ in range(2):
        engine.zero_grad()
        x, y = on_device(torch.ones(2, 32), torch.zeros(2, 32))
        engine.backward(engine.criterion(engine(x).float(), y))
        engine.step()
    if hasattr(engine.model, "settle"):
        engine.model.settle()
    if witness is not None:
        witness.see(model, optimizer, engine, engine.model, engine.optimizer)


def test_engines_are_freed() -> None:
    spawn(check_engines, 2)


def check_pipelines(rank: int, world_size: int, port: int) -> None:
    colossalai.launch(
        pipeline_config("1f1b", 2, 2), rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False
    )
    plans = {
        "booster": pipeline_of_booster,
        "zero": lambda w: pipeline_of_booster(w, LowLevelZeroPlugin(stage=1, precision="fp32")),
        "engine": pipeline_of_engine,
    }
    for name, run in plans.items():
        run(None)
        witness = Witness()
        for _ in range(2):
            run(witness)
        witness.check(f"pipeline, {name}")


def stage() -> nn.Module:
    place = Placement(gpc.pipeline_parallel_size, 1, Shape.LOOP)
    found: nn.Module = cut(build_stages(), place, gpc.mesh.coord["pp"])[0]  # type: ignore[arg-type]
    return found


def batches() -> Any:
    return iter([(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))])


def pipeline_of_booster(witness: Witness | None, plugin: Plugin | None = None) -> None:
    model = stage()
    booster = Booster("cpu", plugin=plugin)
    found = booster.boost(model, HybridAdam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss())
    booster.execute_pipeline(batches(), found.model, found.criterion, found.optimizer)
    found.optimizer.step()
    if witness is not None:
        witness.see(model, found.model, found.optimizer)


def pipeline_of_engine(witness: Witness | None) -> None:
    model = stage()
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    engine.train()
    engine.execute_schedule(batches(), return_output_label=False)
    engine.step()
    if witness is not None:
        witness.see(model, optimizer, engine, engine.optimizer)


def test_pipelines_are_freed() -> None:
    spawn(check_pipelines, 2)


def test_a_part_of_the_model_keeps_its_run(tmp_path: Path) -> None:
    """A script that goes on with the bare model, or a part of it, is not forgotten; copies and pickles are
    not part of a run.
    """
    booster = Booster("cpu")
    model = build()
    part = model[3]
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "run" not in pickle.loads(pickle.dumps(part)).__dict__.get("_colossalai_attached", {})
    assert not copy.deepcopy(model).__dict__.get("_colossalai_attached")
    del model
    gc.collect()
    booster.save(tmp_path / "run")
    other = Booster("cpu")
    boosted, *_ = other.boost(build(), None)
    other.load(tmp_path / "run", strict=False)
    torch.testing.assert_close(boosted.unwrap()[3].weight, part.weight)


def test_a_model_that_is_gone_is_not_saved(tmp_path: Path) -> None:
    booster = Booster("cpu")
    first, *_ = booster.boost(build())
    second, *_ = booster.boost(nn.Linear(2, 2))
    del first
    booster.save(tmp_path / "run")
    other = Booster("cpu")
    loaded, *_ = other.boost(nn.Linear(2, 2))
    other.load(tmp_path / "run")
    torch.testing.assert_close(loaded.unwrap().weight, second.unwrap().weight)
