"""Wrote the checkpoints in this folder, with the code of commit 4947fa0; the tests load them with the present
code.

    git worktree add --detach /tmp/old 4947fa0
    PYTHONPATH=/tmp/old python tests/checkpoint_io/written_at_4947fa0/write.py

Only names that 4947fa0 has are used here.  The folder ``expected`` holds what the code of that commit loads
from each
checkpoint into the serial model: weights, and optimizer states as ``optimizer/<parameter>/<state>``.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, Plugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.policies import Cut, Depth, Policy
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint

FOLDER = Path(__file__).parent
WORDS, WIDTH, STEPS = 8, 4, 2
SMALL = 8e-4  # MB: several shards


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class TiedWords(nn.Module):
    """Two blocks between an embedding and a head that share their weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(hidden).float()
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


POLICY = Policy(
    ("words",), {"up": Cut("expand"), "down": Cut("contract")}, depth=Depth("blocks", entry=("embed",))
)


class Case(NamedTuple):
    ranks: int
    plugin: Callable[[], Plugin] | None = None
    parallel: dict[str, Any] = {}  # noqa: RUF012 - never changed
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    @property
    def stages(self) -> int:
        return int(self.parallel.get("pipeline", 1))


SCALE = {"initial_scale": 2.0**8}
CASES = {
    "serial": Case(1),
    "zero2": Case(2, partial(LowLevelZeroPlugin, 2, "fp16", **SCALE), optimizer=HybridAdam),
    "gemini": Case(2, partial(GeminiPlugin, precision="bf16", placement_policy="cpu"), optimizer=HybridAdam),
    "1d_pipeline": Case(4, parallel={"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}),
}


class Job:
    """A training of ``TiedWords`` under the plan of a case, on the launched ranks."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        if case.ranks > 1 and not dist.is_initialized():
            config = {"parallel": case.parallel, "NUM_MICRO_BATCHES": 2}
            colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
        self.case = case
        model: nn.Module = TiedWords(seed)
        if case.stages > 1:
            model = split_model(model, policy=POLICY)
        optimizer = case.optimizer(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        self.booster = Booster("cpu", plugin=case.plugin and case.plugin())
        boosted = self.booster.boost(model, optimizer, None, None, scheduler)
        self.model: Any = boosted.model
        self.optimizer: Any = boosted.optimizer
        self.scheduler: Any = boosted.lr_scheduler

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            made = torch.randint(WORDS, (2, 8, 3), generator=torch.Generator().manual_seed(step))
            replicas = gpc.data_parallel_size if gpc.is_initialized(ParallelMode.DATA) else 1
            rank = gpc.get_local_rank(ParallelMode.DATA) if replicas > 1 else 0
            ids, labels = (t.chunk(replicas)[rank] for t in made)
            batch = {"ids": ids, "labels": labels}
            if self.case.stages > 1:
                self.booster.execute_pipeline(iter([batch]), self.model, None, self.optimizer)
            else:
                self.booster.backward(self.model(**batch)["loss"], self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()


def contents(job: Job) -> dict[str, Tensor]:
    """The weights of a serial job and its optimizer states, by their names."""
    model = job.model.unwrap() if hasattr(job.model, "unwrap") else job.model
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        for state, value in job.optimizer.state[param].items():
            found[f"optimizer/{name}/{state}"] = torch.as_tensor(value)
    return {name: value.detach().clone() for name, value in found.items()}


def _write(rank: int, world_size: int, port: int, name: str) -> None:
    job = Job(CASES[name])
    job.train(0, STEPS)
    if name != "gemini":  # the streams of random numbers are most of the bytes, so one case has them
        importlib.import_module("colossalai.checkpoint_io.random_state").get_seeds = dict  # type: ignore[attr-defined]
    booster, files = job.booster, FOLDER / name
    booster.save(files / "run", {"step": STEPS})
    booster.save_model(job.model, files / "model.bin")
    if job.case.stages == 1:
        booster.save_optimizer(job.optimizer, files / "optimizer.bin")
    small: dict[str, Any] = {"shard": True, "size_per_shard": SMALL}
    if name in ("serial", "zero2"):
        booster.save_optimizer(job.optimizer, files / "shards_bin", **small)
    if name == "serial":
        booster.save_model(job.model, files / "model.safetensors")
        booster.save_model(job.model, files / "shards_bin", **small)
        booster.save_model(job.model, files / "shards_safetensors", **small, use_safetensors=True)
        booster.save_lr_scheduler(job.scheduler, files / "scheduler.bin")
    if name in ("serial", "1d_pipeline"):
        save_checkpoint(files / "training.pt", STEPS, job.model, job.optimizer, job.scheduler)


def serial_job(name: str) -> Job:
    """A serial job with the optimizer of a case, for its checkpoints."""
    return Job(Case(1, optimizer=CASES[name].optimizer), seed=1)


def _expect(name: str) -> None:
    """What this code reads from the checkpoints of a case."""
    files, expected = FOLDER / name, FOLDER / "expected"
    run = serial_job(name)
    run.booster.load(files / "run")
    expected.mkdir(exist_ok=True)
    save_file(contents(run), expected / f"{name}_run.safetensors")
    weights = serial_job(name)
    weights.booster.load_model(weights.model, files / "model.bin")
    if CASES[name].stages == 1:
        weights.booster.load_optimizer(weights.optimizer, files / "optimizer.bin")
    save_file(contents(weights), expected / f"{name}_files.safetensors")
    if not (files / "training.pt").exists():
        return
    training = serial_job(name)
    load_checkpoint(files / "training.pt", training.model, training.optimizer, training.scheduler)
    save_file(contents(training), expected / f"{name}_training.safetensors")


if __name__ == "__main__":
    for case_name, case in CASES.items():
        shutil.rmtree(FOLDER / case_name, ignore_errors=True)
        spawn(_write, case.ranks, name=case_name)
        _expect(case_name)
