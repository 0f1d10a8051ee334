"""A parallel mode that a user adds from a script: nothing of ours is edited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.constants import INITIALIZER_MAPPING
from colossalai.context import Config, ConfigException, ParallelMode
from colossalai.context.dist_group_initializer import ProcessGroupInitializer
from colossalai.core import global_context as gpc
from colossalai.registry import DIST_GROUP_INITIALIZER
from colossalai.testing import spawn


# Like the sample of the page "Add Your Own Parallel Mode", which tests/documents runs.
@DIST_GROUP_INITIALIZER.register_module
class MyParallelInitializer(ProcessGroupInitializer):
    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Config,
        data_parallel_size: int,
        pipeline_parallel_size: int,
        tensor_parallel_size: int,
        arg1,
        arg2,
    ):
        super().__init__(rank, world_size, config)
        self.arg1 = arg1
        self.arg2 = arg2
        # ... your variable init

    def init_parallel_groups(self):
        # initialize your process groups
        pass


SEEN: dict[str, Any] = {}


@DIST_GROUP_INITIALIZER.register_module
class EvenAndOdd(ProcessGroupInitializer):
    """Two modes: neighbours at distance 2, made by hand, and pairs, made with the helper."""

    def __init__(self, *args: Any, stride: int) -> None:
        super().__init__(*args)
        self.stride = stride

    def init_dist_group(self) -> list[tuple[Any, ...]]:
        SEEN.update(vars(self))
        strided = []
        for first in range(self.stride):
            ranks = list(range(first, self.world_size, self.stride))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mode = ParallelMode["STRIDED"]
                strided.append((ranks.index(self.rank), len(ranks), group, group, ranks, mode))
        return [*strided, self.new_group([[0, 1], [2, 3]], ParallelMode["PAIRED"])]


def _own_groups(rank: int, world_size: int, port: int) -> None:
    strided, paired = ParallelMode.register("STRIDED", "strided"), ParallelMode.register("PAIRED", "paired")
    INITIALIZER_MAPPING["even_and_odd"] = "EvenAndOdd"
    parallel = {"tensor": {"size": 4, "mode": "even_and_odd", "stride": 2}}
    colossalai.launch({"parallel": parallel, "LR": 0.1}, rank, world_size, "localhost", port, verbose=False)
    for mode, ranks in ((strided, [rank % 2, rank % 2 + 2]), (paired, [rank // 2 * 2, rank // 2 * 2 + 1])):
        assert gpc.get_ranks_in_group(mode) == ranks
        assert gpc.get_local_rank(mode) == ranks.index(rank)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=gpc.get_group(mode))
        assert total.item() == sum(ranks)
    assert gpc.get_ranks_in_group(ParallelMode.TENSOR) == [0, 1, 2, 3]
    # what the initializer was given
    assert (SEEN["rank"], SEEN["world_size"], SEEN["stride"], SEEN["config"].LR) == (rank, 4, 2, 0.1)
    sizes = [SEEN[f"{part}_parallel_size"] for part in ("data", "pipeline", "tensor")]
    assert sizes == [1, 1, 4]
    assert SEEN["mesh"] is gpc.mesh


def test_own_modes_and_groups() -> None:
    spawn(_own_groups, 4)


@pytest.fixture
def mapped() -> Iterator[dict[str, str]]:
    before = dict(INITIALIZER_MAPPING)
    yield INITIALIZER_MAPPING
    INITIALIZER_MAPPING.clear()
    INITIALIZER_MAPPING.update(before)


def _launch(**tensor: Any) -> None:
    colossalai.launch({"parallel": {"tensor": tensor}}, 0, 2, "localhost", 29500, verbose=False)


@pytest.mark.parametrize(
    ("initializer", "options", "message"),
    [
        (
            "NotThere",
            {},
            r"INITIALIZER_MAPPING\['mine'\] is 'NotThere', but no such class is registered; decorate it",
        ),
        (
            "MyParallelInitializer",
            {"arg1": 1},
            r"MyParallelInitializer cannot take the options \{'arg1': 1\}: .*'arg2'",
        ),
        (
            "MyParallelInitializer",
            {"arg1": 1, "arg2": 2, "arg3": 3},
            "cannot take the options .*unexpected .*'arg3'",
        ),
    ],
)
def test_an_unusable_initializer_is_refused_before_any_connection(
    mapped: dict[str, str], initializer: str, options: dict[str, int], message: str
) -> None:
    mapped["mine"] = initializer
    with pytest.raises(ConfigException, match=message):
        _launch(size=2, mode="mine", **options)


@DIST_GROUP_INITIALIZER.register_module
class WithoutMethod(ProcessGroupInitializer):
    pass


@DIST_GROUP_INITIALIZER.register_module
class WrongResult(ProcessGroupInitializer):
    def init_dist_group(self) -> Any:
        return [(0, 1)]


@DIST_GROUP_INITIALIZER.register_module
class NoTuple(ProcessGroupInitializer):
    def init_dist_group(self) -> Any:
        return 3


@DIST_GROUP_INITIALIZER.register_module
class TakesTensor(ProcessGroupInitializer):
    def init_dist_group(self) -> Any:
        return self.new_group([[0]], ParallelMode.TENSOR)


@DIST_GROUP_INITIALIZER.register_module
class LeavesRankOut(ProcessGroupInitializer):
    def init_dist_group(self) -> Any:
        return self.new_group([], ParallelMode.TENSOR)


@pytest.mark.parametrize(
    ("initializer", "error", "message"),
    [
        (
            WithoutMethod,
            TypeError,
            r"WithoutMethod must define init_dist_group\(\) or init_parallel_groups\(\)",
        ),
        (
            WrongResult,
            TypeError,
            r"WrongResult\.init_dist_group\(\) must return tuples \(local_rank, .* got \(0, 1\)",
        ),
        (NoTuple, TypeError, r"NoTuple\.init_dist_group\(\) must return tuples .* got 3"),
        (
            TakesTensor,
            ValueError,
            r"ParallelMode\.TENSOR already has a process group; two initializers made one",
        ),
        (LeavesRankOut, ValueError, r"rank 0 is in none of the groups of ParallelMode\.TENSOR: \[\]"),
    ],
)
def test_a_faulty_initializer_is_named(
    mapped: dict[str, str], free_port: int, initializer: type, error: type[Exception], message: str
) -> None:
    mapped["mine"] = initializer.__name__
    with pytest.raises(error, match=message):
        colossalai.launch(
            {"parallel": {"tensor": {"size": 1, "mode": "mine"}}}, 0, 1, "localhost", free_port, verbose=False
        )
    assert not dist.is_initialized()  # the process can launch again
