"""Weights that pipeline stages share, whose optimizer states each stage's replicas cut in their own way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.checkpoint_io.model_state import ModelState
from colossalai.checkpoint_io.optimizer_state import OptimizerState, stored_states
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredTensor, read_manifest
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.pipeline.doors import POLICY
from tests.pipeline.plans import Block, launch

BEFORE, AFTER = range(2), range(2, 4)


WORDS, WIDTH = 16, 8


class Words(nn.Module):
    """The table is the first parameter of the first stage and the last of the last, so their replicas cut it
    differently.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Case(NamedTuple):
    ranks: int
    stages: int
    plugin: Callable[[], Plugin] | None = None


def _zero(stage: int, elements: float, precision: str = "fp32") -> Callable[[], Plugin]:
    return partial(LowLevelZeroPlugin, stage, precision, 16, reduce_bucket_size_in_m=elements / 2**20)


CASES = {
    "serial": Case(1, 1),
    "pp2-zero1-2": Case(4, 2, _zero(1, 10**6)),
    "pp2-zero2-2, buckets of 150": Case(4, 2, _zero(2, 150)),
    "pp2-ddp2": Case(4, 2, TorchDDPPlugin),
    "pp3-zero1-2": Case(6, 3, _zero(1, 10**6)),
}


class Job:
    def __init__(self, case: Case, seed: int) -> None:
        if not dist.is_initialized():
            launch({"parallel": {"pipeline": case.stages}, "NUM_MICRO_BATCHES": 2})
        self.case = case
        model: nn.Module = Words()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * seed)
        if case.stages > 1:
            model = split_model(model, policy=POLICY)
        self.booster = Booster("cpu", plugin=case.plugin and case.plugin())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        boosted = self.booster.boost(model, optimizer)
        self.model: Any = boosted.model
        self.optimizer: Any = boosted.optimizer

    def train(self, steps: range) -> list[float]:
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        made = torch.randint(WORDS, (2, 16, 3), generator=torch.Generator().manual_seed(step))
        replicas = gpc.data_parallel_size if gpc.is_initialized(ParallelMode.DATA) else 1
        rank = gpc.get_local_rank(ParallelMode.DATA) if replicas > 1 else 0
        ids, labels = (t.chunk(replicas)[rank] for t in made)
        batch = {"ids": ids, "labels": labels}
        if self.case.stages > 1:
            loss = self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)["loss"]
        else:
            loss = self.model(**batch)["loss"]
            self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.tensor([0.0, 0.0]) if loss is None else torch.tensor([loss.item(), 1.0])
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total[0] / total[1])


def _save(rank: int, world_size: int, port: int, name: str, folder: Path) -> list[float]:
    job = Job(CASES[name], 0)
    job.train(BEFORE)
    job.booster.save(folder / name)
    save_checkpoint(folder / f"{name}.pt", 0, job.model, job.optimizer)
    job.booster.save_model(job.model, folder / f"{name} model")
    job.booster.save_optimizer(job.optimizer, folder / f"{name} optimizer", shard=True, size_per_shard=1e-3)
    return job.train(AFTER)


def _load(rank: int, world_size: int, port: int, name: str, sources: list[str], folder: Path) -> Any:
    found = {}
    for source in sources:
        job = Job(CASES[name], 1)
        job.booster.load(folder / source)
        found[source] = job.train(AFTER)
        job = Job(CASES[name], 1)
        load_checkpoint(folder / f"{source}.pt", job.model, job.optimizer)
        found[f"{source}.pt"] = job.train(AFTER)
        job = Job(CASES[name], 1)
        job.booster.load_model(job.model, folder / f"{source} model")
        job.booster.load_optimizer(job.optimizer, folder / f"{source} optimizer")
        found[f"{source} files"] = job.train(AFTER)
    return found


def _check(names: list[str], folder: Path) -> None:
    undisturbed = None
    for name in names:
        losses = spawn(_save, CASES[name].ranks, name=name, folder=folder)[0]
        undisturbed = undisturbed or losses
        assert losses == pytest.approx(undisturbed, rel=1e-5)
        states = stored_states(read_manifest(folder / name), "optimizer")
        assert {"embed.weight", "blocks.0.up.weight"} <= states.keys()
        assert "head.weight" not in states
    for name in names:
        found = spawn(_load, CASES[name].ranks, name=name, sources=names, folder=folder)[0]
        for source, losses in found.items():
            assert losses == pytest.approx(undisturbed, rel=1e-5), f"{source} to {name}"


def test_states_of_a_tied_weight_are_saved_whole_and_found_by_every_plan(tmp_path: Path) -> None:
    _check(["serial", "pp2-zero1-2", "pp2-zero2-2, buckets of 150"], tmp_path)


@pytest.mark.slow
def test_all_plans(tmp_path: Path) -> None:
    _check(list(CASES), tmp_path)


def _lose(folder: Path, what: str) -> None:
    """Take the tensors of ``what`` out of the checkpoint, as a save that had forgotten them."""
    manifest = read_manifest(folder)
    manifest.tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith(what)}
    manifest.write(folder)


def test_states_that_a_checkpoint_has_lost_are_missed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    booster = Booster("cpu")
    boosted = booster.boost(model, torch.optim.Adam(model.parameters()))
    assert boosted.optimizer is not None
    model["used"](torch.ones(1, 2)).sum().backward()
    boosted.optimizer.step()
    booster.save(tmp_path)
    booster.load(tmp_path)  # idle parameters never had states
    _lose(tmp_path, "optimizer/used.weight/")
    with pytest.raises(RuntimeError, match=r"lacks the optimizer states of used\.weight, which had some"):
        booster.load(tmp_path, verify=False)
    booster.load(tmp_path, strict=False, verify=False)
    assert model["used"].weight not in boosted.optimizer.state


def test_states_of_older_versions_under_the_other_name_are_found() -> None:
    """Saves had named the states of a tied weight after the stage that they met first."""
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2)})
    state = OptimizerState(torch.optim.Adam(model.parameters()), ModelState(model).parameter_names)
    tensor = StoredTensor("optimizer/head.weight/exp_avg", (3, 2), torch.float32, [])
    manifest = Manifest({tensor.name: tensor}, ties={"model/head.weight": "model/embed.weight"})
    assert state._stored(manifest) == {"embed.weight": {"exp_avg": tensor}}
