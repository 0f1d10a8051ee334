"""TorchDDPPlugin beyond parity: its data loader, its arguments, odd models, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from colossalai.booster import Booster
from colossalai.booster.plugin import DPPluginBase, TorchDDPPlugin
from colossalai.checkpoint_io import GatheredCheckpointIO
from colossalai.testing import spawn
from colossalai.utils import DataParallelSampler
from tests.booster.plans import batches, launch, mlp


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def test_a_plugin_needs_the_distributed_environment() -> None:
    with pytest.raises(
        RuntimeError, match=r"TorchDDPPlugin needs the distributed environment.*launch_from_torch"
    ):
        TorchDDPPlugin()


def _order(loader: Any) -> list[int]:
    return [int(i) for (batch,) in loader for i in batch]


def _dataloader(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    plugin: DPPluginBase = TorchDDPPlugin()
    dataset = TensorDataset(torch.arange(10))

    loader = plugin.prepare_dataloader(dataset, batch_size=2)
    parts = _gather(_order(loader))
    assert {i for part in parts for i in part} == set(range(10))  # nothing is left out,
    assert len({len(part) for part in parts}) == 1  # all have equally many
    assert [len(batch) for (batch,) in loader] == {1: [2] * 5, 2: [2, 2, 1], 4: [2, 1]}[world_size]

    loader = plugin.prepare_dataloader(dataset, batch_size=2, drop_last=True)
    parts = _gather(_order(loader))
    seen = [i for part in parts for i in part]
    assert len(seen) == len(set(seen))  # nothing is repeated
    assert all(len(batch) == 2 for (batch,) in loader)

    loader = plugin.prepare_dataloader(dataset, batch_size=2, shuffle=True, seed=3)
    again = plugin.prepare_dataloader(dataset, batch_size=2, shuffle=True, seed=3)
    first = _order(loader)
    assert first == _order(again)
    assert {i for part in _gather(first) for i in part} == set(range(10))
    assert isinstance(loader.sampler, DataParallelSampler)
    second = _order(loader)
    assert _gather(second) != _gather(first)
    loader.sampler.set_epoch(0)
    assert _order(loader) == first

    loader = plugin.prepare_dataloader(dataset, 2, collate_fn=lambda items: len(items))
    assert next(iter(loader)) == 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_reads_its_own_part(world_size: int) -> None:
    spawn(_dataloader, world_size)


class _Noise(Dataset):
    """Reads the three generators an augmentation may use."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


def _replica(rank: int, world_size: int) -> TorchDDPPlugin:
    """A plugin that believes itself one of several replicas; ranks of `spawn` may not have workers of their
    own.
    """
    plugin = TorchDDPPlugin.__new__(TorchDDPPlugin)
    plugin.rank, plugin.world_size = rank, world_size
    return plugin


def test_workers_are_seeded_differently_and_reproducibly() -> None:
    def epochs(rank: int, count: int) -> list[Tensor]:
        loader = _replica(rank, 2).prepare_dataloader(_Noise(), batch_size=1, num_workers=2)
        return [torch.cat(list(loader)) for _ in range(count)]

    before = torch.get_rng_state()
    seen = [*epochs(0, 2), *epochs(1, 1)]
    for column in torch.cat(seen).T:
        assert len(set(column.tolist())) == len(column)  # workers, ranks and epochs all differ
    assert torch.equal(epochs(1, 1)[0], seen[2])
    assert torch.equal(
        torch.get_rng_state(), before
    )  # the model's random numbers do not depend on the loader


class _Endless:
    def __getitem__(self, index: int) -> int:
        return index


def _dataloader_errors(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    plugin = TorchDDPPlugin()
    with pytest.raises(TypeError, match=r"needs a dataset with a length .* or an IterableDataset, got _End"):
        plugin.prepare_dataloader(_Endless(), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shard=False\) is for an IterableDataset .*got TensorDataset"):
        plugin.prepare_dataloader(TensorDataset(torch.ones(1)), batch_size=2, shard=False)
    with pytest.raises(ValueError, match="got an empty dataset"):
        plugin.prepare_dataloader(TensorDataset(torch.ones(0)), batch_size=2)
    with pytest.raises(TypeError, match=r"makes the sampler itself.*got batch_sampler"):
        plugin.prepare_dataloader(TensorDataset(torch.ones(1)), batch_size=2, batch_sampler=None)


def test_datasets_that_cannot_be_divided_are_refused() -> None:
    spawn(_dataloader_errors, 1)


def _odd_models(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    booster = Booster(device="cpu", plugin=TorchDDPPlugin())
    torch.manual_seed(rank)
    frozen = mlp().requires_grad_(False)
    model, optimizer, *_ = booster.boost(frozen)
    assert optimizer is None
    sums = _gather([p.sum().item() for p in model.parameters()])
    assert sums[0] == sums[-1]  # rank 0's values
    with booster.no_sync(model):
        assert model(torch.ones(2, 6)).shape == (2, 3)

    without, *_ = booster.boost(nn.Tanh())
    assert without(torch.zeros(1)).item() == 0

    with pytest.raises(
        TypeError, match=r"no_sync needs the model that booster.boost returned.*got Sequential"
    ):
        booster.no_sync(mlp())
    with pytest.warns(UserWarning, match="check_reduction has no effect"):
        TorchDDPPlugin(check_reduction=True)


class Unfinished(DPPluginBase):
    """A plugin without anything of its own."""


def _unfinished(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    plugin = Unfinished()
    booster = Booster(device="cpu", plugin=plugin)
    assert isinstance(booster.checkpoint_io, GatheredCheckpointIO)
    with pytest.raises(
        TypeError, match=r"Unfinished needs a method wrap\(model, optimizer\), or a configure"
    ):
        booster.boost(mlp())
    with pytest.raises(RuntimeError, match="Unfinished does not support no_sync"):
        booster.no_sync(mlp())


def test_a_plugin_says_what_it_lacks() -> None:
    spawn(_unfinished, 1)


def test_models_without_anything_to_train() -> None:
    spawn(_odd_models, 2)


def _local_steps(rank: int, world_size: int, port: int, precision: str | None) -> None:
    """Good loops, then a bad one."""
    launch(rank, world_size, port)
    booster = Booster(device="cpu", plugin=TorchDDPPlugin(), mixed_precision=precision)
    model = mlp()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[assignment]

    def backward() -> None:
        booster.backward(model(torch.full((2, 6), rank + 1.0)).float().mean() * 0.01, optimizer)

    with booster.no_sync(model):
        backward()
    backward()  # averages both
    with torch.no_grad(), booster.no_sync(model):
        model(torch.ones(2, 6))
    optimizer.step()
    with booster.no_sync(model):
        backward()
    optimizer.zero_grad()
    optimizer.step()  # with nothing
    with booster.no_sync(model):
        backward()
    with pytest.raises(RuntimeError, match="gradients that were not averaged"):
        optimizer.step()


@pytest.mark.parametrize("precision", [None, "fp16_naive"])
def test_a_step_with_gradients_that_were_not_averaged_is_refused(precision: str | None) -> None:
    spawn(_local_steps, 2, precision=precision)


def _buffers(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for broadcast in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        booster = Booster(device="cpu", plugin=TorchDDPPlugin(broadcast_buffers=broadcast))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batches((8,))[0]
        parts = [x[0::2], x[1::2] + 1]
        means = [
            0.1 * model[0](part).mean(0).detach() for part in parts
        ]  # after one step of BatchNorm's momentum
        booster.backward(F.cross_entropy(boosted(parts[rank]), y[rank::2]), optimizer)
        optimizer.step()
        torch.testing.assert_close(boosted.state_dict()["1.running_mean"], means[rank])
        boosted.eval()
        boosted(x)  # a forward pass takes the buffers of rank 0, or does not
        torch.testing.assert_close(boosted.state_dict()["1.running_mean"], means[0 if broadcast else rank])


def test_buffers_follow_rank_0_unless_told_not_to() -> None:
    spawn(_buffers, 2)
