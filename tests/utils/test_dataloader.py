from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

import colossalai
from colossalai.booster import booster as booster_module
from colossalai.logging import DistributedLogger
from colossalai.registry import DATA_SAMPLERS
from colossalai.testing import spawn
from colossalai.utils import DataParallelSampler, dataloader, get_dataloader
from colossalai.utils.dataloader import warn_if_undivided


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Draws(Numbers):
    """Each sample is three random numbers, as an augmentation would draw them."""

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        return [random.randrange(10**9), np.random.randint(10**9), int(torch.randint(10**9, ()))]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Data-parallel rank and size that the test chooses."""
    place = [0, 1]
    monkeypatch.setattr(dataloader, "data_parallel_place", lambda: tuple(place))
    return place


def _of_all_ranks(
    place: list[int], size: int, ranks: int, passes: int = 1, **kwargs: bool
) -> list[list[int]]:
    order = []
    for rank in range(ranks):
        place[:] = [rank, ranks]
        sampler = DataParallelSampler(Numbers(size), **kwargs)  # type: ignore[arg-type]
        for _ in range(passes):
            indices = list(sampler)
        assert len(indices) == len(sampler)
        order.append(indices)
    return order


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "ranks"), [(12, 3), (13, 3), (2, 5), (1, 4), (7, 1)])
def test_ranks_share_the_dataset(place: list[int], size: int, ranks: int, shuffle: bool) -> None:
    order = _of_all_ranks(place, size, ranks, shuffle=shuffle)
    assert len({len(indices) for indices in order}) == 1
    read = [index for indices in order for index in indices]
    assert set(read) == set(range(size))
    assert len(read) - size < ranks


def test_without_shuffle_the_order_is_kept(place: list[int]) -> None:
    assert _of_all_ranks(place, 7, 2) == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert _of_all_ranks(place, 7, 2, drop_last=True) == [[0, 2, 4], [1, 3, 5]]


def test_each_pass_has_another_order_and_a_seed_repeats_it(place: list[int]) -> None:
    first = _of_all_ranks(place, 40, 2, shuffle=True)
    second = _of_all_ranks(place, 40, 2, passes=2, shuffle=True)
    assert first != second
    assert sorted(second[0] + second[1]) == list(range(40))
    assert second == _of_all_ranks(place, 40, 2, passes=2, shuffle=True)

    sampler = DataParallelSampler(Numbers(40), shuffle=True)
    list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first[1]
    sampler.set_epoch(1)
    assert list(sampler) == second[1]
    assert list(DataParallelSampler(Numbers(40), shuffle=True, seed=5)) != first[1]


def test_a_dataset_without_a_sample_per_rank_is_refused(place: list[int]) -> None:
    place[:] = [0, 4]
    with pytest.raises(
        ValueError, match=r"3 samples has none for each of 4 data-parallel ranks; .*drop_last=False"
    ):
        DataParallelSampler(Numbers(3), drop_last=True)
    with pytest.raises(ValueError, match="a dataset of 0 samples"):
        DataParallelSampler(Numbers(0))


def test_the_sampler_is_registered() -> None:
    assert DATA_SAMPLERS.get_module("DataParallelSampler") is DataParallelSampler


def test_one_process_needs_no_launch() -> None:
    loader = get_dataloader(Numbers(10), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch) for batch in get_dataloader(Numbers(10), batch_size=4, drop_last=True)] == [4, 4]
    shuffled = get_dataloader(Numbers(10), shuffle=True, batch_size=10)
    first, second = next(iter(shuffled)).tolist(), next(iter(shuffled)).tolist()
    assert sorted(first) == list(range(10))
    assert first != second
    assert next(iter(get_dataloader(Numbers(10), shuffle=True, batch_size=10))).tolist() == first
    assert next(iter(get_dataloader(Numbers(10), shuffle=True, seed=3, batch_size=10))).tolist() != first


def test_who_divides_the_dataset(
    place: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place[:] = [1, 2]
    monkeypatch.setattr(dataloader, "get_dist_logger", lambda: DistributedLogger("data"))
    assert next(iter(get_dataloader(Numbers(6), batch_size=3))).tolist() == [1, 3, 5]
    assert next(iter(get_dataloader(Numbers(6), batch_size=3, add_sampler=False))).tolist() == [0, 1, 2]
    own = SequentialSampler(range(6))
    assert next(iter(get_dataloader(Numbers(6), batch_size=3, sampler=own))).tolist() == [0, 1, 2]
    batches = BatchSampler(own, 2, drop_last=False)
    assert next(iter(get_dataloader(Numbers(6), batch_sampler=batches))).tolist() == [0, 1]
    assert capsys.readouterr().err == ""
    assert next(iter(get_dataloader(Stream(), batch_size=4))).tolist() == [0, 1, 2, 3]
    assert "cannot divide an IterableDataset" in capsys.readouterr().err
    with pytest.raises(ValueError, match="mutually exclusive"):
        get_dataloader(Numbers(6), shuffle=True, sampler=own)
    with pytest.raises(ValueError, match="mutually exclusive"):
        get_dataloader(Numbers(6), shuffle=True, batch_sampler=batches)


def test_a_loader_that_every_rank_reads_whole_is_named(
    place: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place[:] = [0, 2]
    monkeypatch.setattr(dataloader, "get_dist_logger", lambda: DistributedLogger("data"))
    plain = DataLoader(Numbers(6), batch_size=3, shuffle=True)
    own = DataLoader(Numbers(6), sampler=DistributedSampler(Numbers(6), 2, 0))
    for fine, ranks in ((plain, 1), (get_dataloader(Numbers(6), batch_size=3), 2), (own, 2), ([1, 2], 2)):
        warn_if_undivided("the loader", fine, ranks)
    assert capsys.readouterr().err == ""
    warn_if_undivided("the loader", plain, 2)
    assert "the loader is not divided: each of 2 data-parallel ranks" in capsys.readouterr().err


def _whole(rank: int, world_size: int, port: int, plugin: str | None) -> int:
    heard: list[int] = []
    booster_module.warn_if_undivided = lambda name, loader, ranks: heard.append(ranks)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(6))
    if plugin is None:
        colossalai.initialize(model, optimizer, torch.nn.MSELoss(), loader, verbose=False)
    else:
        colossalai.Booster(plugin=plugin).boost(model, optimizer, dataloader=loader)
    return heard[0]


@pytest.mark.parametrize("plugin", ["zero2", None])
def test_both_doors_look_at_the_loader(plugin: str | None) -> None:
    assert spawn(_whole, 2, plugin=plugin) == [2, 2]


def _draws(seed: int = 1024) -> list[list[list[int]]]:
    loader = get_dataloader(Draws(4), seed=seed, num_workers=2, batch_size=1, collate_fn=list)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


def test_workers_draw_by_seed_data_rank_worker_and_pass(place: list[int]) -> None:
    place[:] = [0, 2]
    first = _draws()
    assert first == _draws()
    place[:] = [1, 2]
    runs = [*first, *_draws(), *_draws(seed=7)]
    samples = [sample for run in runs for sample in run]
    for stream in range(3):  # python, numpy, torch
        assert len({sample[stream] for sample in samples}) == len(samples)


def _batches() -> list[list[int]]:
    return [b.tolist() for b in get_dataloader(Numbers(8), shuffle=True, batch_size=2)]


def _read(rank: int, world_size: int, port: int, tensor: int) -> None:
    if tensor:
        parallel = {"tensor": {"size": tensor, "mode": "1d"}}
        colossalai.launch(
            {"parallel": parallel}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False
        )
    else:
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}"
        )
    gathered: list[list[list[int]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, _batches())
    tensor = max(tensor, 1)
    for first in range(0, world_size, tensor):  # one tensor-parallel group reads the same samples
        assert all(gathered[first + other] == gathered[first] for other in range(tensor))
    read = [sample for rank in range(0, world_size, tensor) for batch in gathered[rank] for sample in batch]
    assert sorted(read) == list(range(8))


@pytest.mark.parametrize(("world_size", "tensor"), [(2, 0), (4, 2), (2, 1)])
def test_real_ranks_share_the_dataset(world_size: int, tensor: int) -> None:
    spawn(_read, world_size, tensor=tensor)
