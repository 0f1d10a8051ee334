"""Arguments of the wrong kind are refused by name, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.nn.optimizer import FusedAdam, FusedLAMB, Lars
from colossalai.testing import spawn


def _boost(**given: Any) -> Any:
    model = nn.Linear(2, 2)
    return Booster(device="cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def _elsewhere() -> StepLR:
    return StepLR(torch.optim.Adam(nn.Linear(2, 2).parameters()), 1)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "criterion": (
        lambda _: _boost(criterion=3),
        TypeError,
        "boost needs a criterion that can be called.*got 3",
    ),
    "criterion class": (lambda _: _boost(criterion=nn.MSELoss), TypeError, "boost needs a criterion"),
    "dataloader": (
        lambda _: _boost(dataloader=3),
        TypeError,
        "boost needs a dataloader that can be iter.*got 3",
    ),
    "scheduler": (
        lambda _: _boost(lr_scheduler="sched"),
        TypeError,
        "boost needs a learning-rate sched.*'sched'",
    ),
    "scheduler elsewhere": (
        lambda _: _boost(lr_scheduler=_elsewhere()),
        ValueError,
        r"lr_scheduler \(StepLR\) was built on another optimizer \(Adam\)",
    ),
    "saved scheduler": (
        lambda path: Booster("cpu").save_lr_scheduler(nn.Linear(2, 2), path),  # type: ignore[arg-type]
        TypeError,
        "save_lr_scheduler needs a learning-rate scheduler",
    ),
    "loaded scheduler": (
        lambda path: Booster("cpu").load_lr_scheduler(_boost().optimizer, path),
        TypeError,
        "load_lr_scheduler needs a learning-rate scheduler",
    ),
    "half_weights": (
        lambda _: BF16MixedPrecision(half_weights="yes"),  # type: ignore[arg-type]
        TypeError,
        "half_weights to be True or False, got 'yes'",
    ),
    "max_norm": (
        lambda _: _boost().optimizer.clip_grad_by_norm("a"),
        TypeError,
        "clipping needs a number as max_norm, got 'a'",
    ),
    "norm_type": (
        lambda _: _boost().optimizer.clip_grad_by_norm(1.0, "a"),
        TypeError,
        "clipping needs a number as norm_type, got 'a'",
    ),
    "clip_value": (
        lambda _: _boost().optimizer.clip_grad_by_value("a"),
        ValueError,
        "clip_grad_by_value needs a clip_value of at least 0, got 'a'",
    ),
    "size_per_shard": (
        lambda path: Booster("cpu").save_model(nn.Linear(2, 2), path, shard=True, size_per_shard="1GB"),  # type: ignore[call-overload]
        ValueError,
        "save_model needs size_per_shard, a number of MB, .* got '1GB'",
    ),
    "third of save_model": (
        lambda path: Booster("cpu").save_model(nn.Linear(2, 2), path, 1),  # type: ignore[call-overload]
        TypeError,
        r"shard \(a bool\) or prefix \(a str or None\) after the path, got 1",
    ),
    "betas": (
        lambda _: FusedAdam(nn.Linear(2, 2).parameters(), betas=0.9),  # type: ignore[arg-type]
        TypeError,
        r"FusedAdam needs two numbers as betas, such as \(0\.9, 0\.999\); got 0\.9",
    ),
    "betas of LAMB": (
        lambda _: FusedLAMB(nn.Linear(2, 2).parameters(), betas=(0.9, "b")),  # type: ignore[arg-type]
        TypeError,
        "FusedLAMB needs a number as beta2; got 'b'",
    ),
    "lr": (
        lambda _: Lars(nn.Linear(2, 2).parameters(), lr="a"),  # type: ignore[arg-type]
        TypeError,
        "Lars needs a number as lr; got 'a'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_schedulers_of_the_same_optimizer_are_taken() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    Booster(device="cpu").boost(model, optimizer, nn.functional.mse_loss, [(1, 2)], scheduler)  # type: ignore[arg-type]


def _loader(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, "gloo", verbose=False)
    samples = TensorDataset(torch.zeros(3, 2))
    with pytest.raises(
        ValueError, match=r"loader of prepare_dataloader is empty.*smaller than the batch size"
    ):
        TorchDDPPlugin().prepare_dataloader(samples, batch_size=4, drop_last=True)
    assert len(TorchDDPPlugin().prepare_dataloader(samples, batch_size=4)) == 1


def test_a_loader_without_batches_is_refused() -> None:
    spawn(_loader, 1)
