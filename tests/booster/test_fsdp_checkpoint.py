"""A checkpoint knows nothing of the ranks that wrote it: FSDP on any number of them, DDP and serial read each
other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.checkpoint_io.files import state_file
from colossalai.checkpoint_io.files.gathering import Gathering
from colossalai.testing import spawn
from tests.booster.plans import batches, launch, loss_of
from tests.booster.towers import TiedTower, Tower, groups

WAYS: list[dict[str, Any]] = [
    {"shard": False},
    {"shard": True, "size_per_shard": 2e-4},
]


class Job:
    """A tower and its optimizer in training, whose ranks all see the whole batch, so that every plan does the
    same.
    """

    def __init__(self, booster: Booster, seed: int, build: type[nn.Module] = Tower) -> None:
        torch.manual_seed(seed)
        model = build()
        optimizer = groups(model.parameters())
        self.booster = booster
        self.model, self.optimizer, _, _, self.scheduler = booster.boost(
            model, optimizer, lr_scheduler=StepLR(optimizer, 1, gamma=0.9)
        )

    def train(self, steps: int) -> None:
        for batch in batches([4] * steps):
            self.booster.backward(loss_of(self.model, batch), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            assert self.scheduler is not None
            self.scheduler.step()

    def save(self, folder: Path, **way: Any) -> None:
        self.booster.save_model(self.model, folder / "model", use_safetensors=way["shard"], **way)
        self.booster.save_optimizer(self.optimizer, folder / "optimizer", **way)
        self.booster.save_lr_scheduler(self.scheduler, folder / "scheduler")

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, folder / "model")
        self.booster.load_optimizer(self.optimizer, folder / "optimizer")
        self.booster.load_lr_scheduler(self.scheduler, folder / "scheduler")

    def weights(self) -> list[torch.Tensor]:
        weights: list[Any] = [p.detach() for p in self.model.parameters()]
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]


def plans() -> dict[str, Booster]:
    return {
        "fsdp": Booster("cpu", plugin=TorchFSDPPlugin()),
        "ddp": Booster("cpu", plugin=TorchDDPPlugin()),
        "serial": Booster("cpu"),
    }


def _write(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    for name, booster in plans().items():
        for i, way in enumerate(WAYS):
            job = Job(booster, 0)
            job.train(2)
            if name != "serial" or rank == 0:
                job.save(folder / f"{name}{i}", **way)


def _read(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    reference = Job(Booster("cpu"), 0)
    reference.train(2)
    reference.train(2)
    for path in sorted(folder.iterdir()):
        for name, booster in plans().items():
            job = Job(booster, 1)
            job.train(1)
            job.load(path)
            job.train(2)
            assert job.scheduler is not None
            assert job.scheduler.get_last_lr() == pytest.approx([0.01 * 0.9**4, 0.03 * 0.9**4])
            for got, expected in zip(job.weights(), reference.weights(), strict=True):
                torch.testing.assert_close(
                    got, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, p=path: f"{p} into {n}: {m}"
                )


def test_any_plan_reads_any_plans_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    spawn(_write, 2, folder=tmp_path)
    spawn(_read, 3, folder=tmp_path)


def _sharded(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    booster = plans()["fsdp"]
    job = Job(booster, 0, TiedTower)
    job.train(1)
    gather = Gathering.whole

    def watched(self: Gathering, name: str) -> Any:
        whole = gather(self, name)
        assert (whole is None) == (rank != 0)
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gathering, "whole", watched)
        job.save(folder, shard=True, size_per_shard=2e-4)
    if rank == 0:
        index = CheckpointIndexFile.from_file(folder / "model" / "model.safetensors.index.json")
        sizes = [Path(name).stat().st_size for name in index.get_checkpoint_filenames()]
        assert len(sizes) > 3
        assert (
            max(sizes) < 1200
        )  # 2e-4 MB are 210 bytes; the largest tensor has 196, and the header is the rest
    weight = job.weights()[2]
    other = Job(booster, 5, TiedTower)
    other.load(folder)
    tied = other.model.unwrap()
    assert tied.extra.weight is tied.blocks[2].inner.weight
    assert torch.equal(other.weights()[2], weight)


def test_shards_are_gathered_one_by_one_and_ties_survive(tmp_path: Path) -> None:
    spawn(_sharded, 2, folder=tmp_path)


def _errors(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    booster = plans()["fsdp"]
    job = Job(booster, 0)
    job.train(1)
    job.save(folder, shard=False)
    with pytest.raises(ValueError, match="gather_dtensor=False asks for a checkpoint of cut tensors"):
        booster.save_model(job.model, folder / "other", gather_dtensor=False)
    larger = Tower()
    larger.blocks.append(nn.Linear(7, 7, bias=False))
    taller, *_ = booster.boost(larger)
    with pytest.raises(RuntimeError, match=r"model does not fit \w*Tower: it lacks blocks.3.weight"):
        booster.load_model(taller, folder / "model")
    torch.manual_seed(0)
    narrow, *_ = booster.boost(nn.Sequential(nn.Linear(5, 7)))
    torch.save({"0.weight": torch.ones(7, 6), "0.bias": torch.ones(7)}, folder / f"narrow{rank}")
    with pytest.raises(RuntimeError, match=r"(?s)does not fit the model: .*size mismatch for 0.weight"):
        booster.load_model(narrow, folder / f"narrow{rank}")
    torch.manual_seed(0)
    model = Tower()
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"optimizer does not fit the optimizer: .*groups hold \[5, 11\]"):
        booster.load_optimizer(optimizer, folder / "optimizer")

    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    for way in WAYS:
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_file, "write_file", full_disk)
            for save, item in ((booster.save_model, job.model), (booster.save_optimizer, job.optimizer)):
                error = OSError if rank == 0 else RuntimeError
                with pytest.raises(error, match="no space left"):
                    save(item, folder / f"full{way['shard']}", **way)
    job.train(1)  # all ranks are still in step with each other


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    spawn(_errors, 2, folder=tmp_path)
