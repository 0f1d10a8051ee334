"""Batches of different sizes in a group: every sample counts the same, or it is said that it does not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from colossalai.engine.gradient_accumulation import accumulate_gradient
from colossalai.testing import assert_close, spawn
from colossalai.utils import get_dataloader
from tests.engine.plans import data, initialize, launch, loader, logged, mlp, sgd
from tests.engine.test_accumulation import CRITERION, Stream, serial

SAMPLES, BATCH, GROUP = 21, 2, 4  # groups of 8, 8 and 5 samples; the last batch has one
LOUD = "each batch counts the same"


def large_batches() -> list[Any]:
    x, y = data(SAMPLES).tensors
    return list(zip(x.split(BATCH * GROUP), y.split(BATCH * GROUP), strict=True))


class WithLength:
    """A data loader of somebody else's: it has a length, and tells nothing else."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class OwnBatches(BatchSampler):
    """Cut in a way of its own, for all that the class tells."""


LOADERS: dict[str, Any] = {
    "known": lambda: loader(SAMPLES, BATCH),
    "list": lambda: list(loader(SAMPLES, BATCH)),
    "stream": lambda: DataLoader(Stream(data(SAMPLES)), batch_size=BATCH),
}


def train(batches: Any, epochs: int = 2) -> tuple[nn.Module, list[str]]:
    model = mlp()
    optimizer, batches, *_ = accumulate_gradient(model, sgd(model.parameters()), batches, GROUP)
    with logged() as messages:
        for x, y in chain.from_iterable(repeat(batches, epochs)):
            optimizer.zero_grad()
            optimizer.backward(CRITERION(model(x), y))
            optimizer.step()
    return model, [message for message in messages if LOUD in message]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_shorter_last_batch_counts_by_its_samples(kind: str) -> None:
    model, said = train(LOADERS[kind]())
    expected, _ = serial(large_batches(), decay=1.0)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(p, q)
    assert said == []


@pytest.mark.parametrize("kind", ["other", "sampler"])
def test_sizes_that_cannot_be_known_are_reported_once(kind: str) -> None:
    sampler = OwnBatches(SequentialSampler(data(SAMPLES)), BATCH, drop_last=False)
    batches = {
        "other": WithLength(list(loader(SAMPLES, BATCH))),
        "sampler": DataLoader(data(SAMPLES), batch_sampler=sampler),
    }
    _, said = train(batches[kind])
    assert len(said) == 1
    assert "met a batch of 1 samples after batches of 2" in said[0]
    _, said = train(WithLength(list(loader(SAMPLES - 1, BATCH))))
    assert said == [], "all batches have one size"


def test_batches_from_another_loader_are_reported_once() -> None:
    model, own = mlp(), loader(10, 2)
    optimizer, *_ = accumulate_gradient(model, sgd(model.parameters()), own, 2)
    with logged() as messages:
        for x, y in [*own, *own]:
            optimizer.backward(CRITERION(model(x), y))
            optimizer.step()
    said = [message for message in messages if "Loop over the returned train_dataloader" in message]
    assert len(said) == 1
    assert "gradients of 2 iterations were accumulated, but none of their batches came from" in said[0]


def _trained(folder: str, resume: bool, until: int | None, shuffle: bool) -> list[Tensor]:
    batches = get_dataloader(data(SAMPLES), shuffle=shuffle, batch_size=BATCH)
    engine, batches, *_ = initialize({"gradient_accumulation": GROUP}, train_dataloader=batches)
    assert engine.booster is not None
    if resume:
        assert engine.booster.load(folder) == {"updates": 1}
    for number, (x, y) in enumerate(chain.from_iterable(repeat(batches, 1 if until else 2)), start=1):
        engine.zero_grad()
        engine.backward(CRITERION(engine(x), y))
        engine.step()
        if number == until:
            engine.booster.save(folder, {"updates": 1})
            break
    return [p.detach().clone() for p in engine.model.parameters()]


def check_resumed(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(port)
    for shuffle in (False, True):
        expected = _trained(folder, False, None, shuffle)
        _trained(folder, False, GROUP, shuffle)  # saved after one of the three groups of a pass
        for p, q in zip(_trained(folder, True, None, shuffle), expected, strict=True):
            assert torch.equal(p, q)


def test_a_run_goes_on_within_a_pass_with_the_groups_that_are_left(tmp_path: Path) -> None:
    spawn(check_resumed, 1, folder=str(tmp_path / "run"))


def check_no_loader(rank: int, world_size: int, port: int) -> None:
    launch(port)
    with logged() as messages:
        initialize({"gradient_accumulation": 2})
        initialize({"gradient_accumulation": 2})
        initialize({"gradient_accumulation": 2}, train_dataloader=loader(4, 2))
    assert len([m for m in messages if "initialize got no train_dataloader" in m]) == 1


def test_accumulation_without_a_data_loader_is_reported_once() -> None:
    spawn(check_no_loader, 1)
