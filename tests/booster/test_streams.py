"""``prepare_dataloader`` of an ``IterableDataset``: each rank has its own samples, whatever the workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from colossalai.trainer.trainer import set_epoch
from colossalai.utils.sharded_iterable import ShardedIterable


class Numbers(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)


class SplitByWorker(Numbers):
    """Divides itself among workers, as torch's documents have it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, self.size, step)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.size


class Shuffled(Numbers):
    """Draws its order from the generators that everything draws from."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        for i in order:
            yield i + 100 * int(torch.randint(2, ())) + 1000 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def replica(rank: int, world_size: int) -> TorchDDPPlugin:
    """A plugin that believes itself one of several replicas."""
    plugin = TorchDDPPlugin.__new__(TorchDDPPlugin)
    plugin.rank, plugin.world_size = rank, world_size
    return plugin


def passes(dataset: Any, ranks: int, **options: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    loaders = [replica(r, ranks).prepare_dataloader(dataset, **options) for r in range(ranks)]
    return [[batch.tolist() for batch in loader] for loader in loaders]


def flat(batches: Any) -> list[int]:
    return list(chain.from_iterable(batches))


def test_every_sample_is_seen_once() -> None:
    assert passes(Numbers(12), 2, batch_size=3) == [
        [[0, 2, 4], [6, 8, 10]],
        [[1, 3, 5], [7, 9, 11]],
    ]
    assert passes(Numbers(5), 1, batch_size=2) == [[[0, 1], [2, 3], [4]]]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9])
def test_uneven_ends(size: int) -> None:
    """Ranks have equally many; the last round is filled up from the beginning, or left out."""
    found = passes(Numbers(size), 3, batch_size=2)
    samples = [flat(batches) for batches in found]
    assert {len(own) for own in samples} == {-(-size // 3)}
    rounds = flat(zip(*samples, strict=True))
    assert rounds[:size] == list(range(size))
    assert rounds[size:] == [i % size for i in range(len(rounds) - size)]

    if size < 3:
        with pytest.raises(ValueError, match=rf"Numbers ended after {size} samples.*none for each of 3"):
            passes(Numbers(size), 3, batch_size=2, drop_last=True)
        return
    found = passes(Numbers(size), 3, batch_size=2, drop_last=True)
    assert all(len(batch) == 2 for batch in flat(found))
    assert sorted(flat(flat(found))) == list(range(size // 6 * 6))


@pytest.mark.parametrize("kind", [Numbers, SplitByWorker, Shuffled])
def test_workers_change_nothing(kind: type[Numbers]) -> None:
    alone = passes(kind(11), 2, batch_size=2)
    assert passes(kind(11), 2, batch_size=2, num_workers=2) == alone
    assert len({i % 100 for i in flat(flat(alone))}) == 11


def test_a_stream_that_shuffles() -> None:
    """The order is the same on all ranks, another in each pass, and that of the pass that is asked for."""
    loaders = [replica(r, 2).prepare_dataloader(Shuffled(8), batch_size=2, seed=5) for r in range(2)]
    before = random.getstate(), torch.get_rng_state()
    both = []
    for number in range(2):
        random.seed(number)  # what a rank or the model draws does not matter
        torch.manual_seed(number)
        both.append([flat(b.tolist() for b in loader) for loader in loaders])
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    for own in both:
        assert sorted(i % 100 for i in flat(own)) == list(range(8))
    assert both[0] != both[1]
    set_epoch(loaders[0], 1)  # as Trainer does; the dataset hears of it
    assert [i % 1000 for i in flat(b.tolist() for b in loaders[0])] == both[1][0]
    assert loaders[0].dataset.dataset.epoch == 1
    list(loaders[1])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_lengths() -> None:
    loader = replica(0, 2).prepare_dataloader(Sized(11), batch_size=2)
    assert len(loader) == len(list(loader)) == 3
    loader = replica(0, 2).prepare_dataloader(Sized(11), batch_size=2, drop_last=True)
    assert len(loader) == len(list(loader)) == 2
    with pytest.raises(TypeError, match="no len"):
        len(replica(0, 2).prepare_dataloader(Numbers(11), batch_size=2))
    batches = replica(1, 2).prepare_dataloader(Numbers(4), batch_size=None)  # type: ignore[arg-type]
    assert list(batches) == [1, 3]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_pass_goes_on_with_other_ranks(workers: dict[str, Any]) -> None:
    loader = replica(0, 2).prepare_dataloader(Shuffled(20), batch_size=2, **workers)
    whole = flat(b.tolist() for b in replica(0, 1).prepare_dataloader(Shuffled(20), batch_size=20))
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    assert flat(seen) == whole[:8:2]
    state = loader.state_dict()  # type: ignore[attr-defined]
    assert state == {"epoch": 0, "samples": 8}
    others = [replica(r, 3).prepare_dataloader(Shuffled(20), batch_size=1, **workers) for r in range(3)]
    for other in others:
        if workers:
            next(iter(other))  # workers that stay began at the first sample
        other.load_state_dict(state)  # type: ignore[attr-defined]
        assert other.state_dict() == state  # type: ignore[attr-defined]
    rest = [flat(b.tolist() for b in other) for other in others]
    assert flat(zip(*rest, strict=True)) == whole[8:]
    assert others[0].state_dict() == {"epoch": 1, "samples": 0}  # type: ignore[attr-defined]
    assert len(list(others[0])) == 7  # the next pass is a whole one


def test_a_dataset_that_shards_itself_is_left_alone() -> None:
    plugin, dataset = replica(1, 2), SplitByWorker(4)
    loader = plugin.prepare_dataloader(dataset, batch_size=2, shard=False)
    assert loader.dataset is dataset
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    dataset._distributed = SimpleNamespace(rank=1, world_size=2)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"divided by split_dataset_by_node already; pass shard=False"):
        plugin.prepare_dataloader(dataset, batch_size=2)
    with pytest.raises(ValueError, match=r"cannot choose the order of an IterableDataset \(Numbers\)"):
        plugin.prepare_dataloader(Numbers(3), batch_size=2, shuffle=True)


class Pairs(Numbers):
    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(self.size):
            yield torch.randn(3, generator=draw), torch.randn(1, generator=draw)


def check_training(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Training on a stream equals that of one process; it is saved in the middle, and goes on."""
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    serial, optimizer = build()
    for x, y in DataLoader(Pairs(16), batch_size=4):
        optimizer.zero_grad()
        nn.functional.mse_loss(serial(x), y).backward()
        optimizer.step()

    for resumed in (False, True):
        plugin = TorchDDPPlugin()
        booster = Booster(device="cpu", plugin=plugin)
        loader = plugin.prepare_dataloader(Pairs(16), batch_size=2)
        assert isinstance(loader.dataset, ShardedIterable)
        model, optimizer, _, loader, _ = booster.boost(*build(), dataloader=loader)
        if resumed:
            booster.load(folder / "half")
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            booster.backward(nn.functional.mse_loss(model(x), y), optimizer)
            optimizer.step()
            if step == 1 and not resumed:
                booster.save(folder / "half")
        assert step == (1 if resumed else 3)
        torch.testing.assert_close(model.state_dict(), serial.state_dict())
        dist.barrier()


def test_training_on_a_stream_equals_serial_training(tmp_path: Path) -> None:
    spawn(check_training, 2, folder=tmp_path)
