"""``state_dict_shard``: all weights, and never all of them at once."""

from __future__ import annotations

import pytest
import torch

from colossalai.checkpoint_io.files.sharding import size_of
from colossalai.testing import spawn
from tests.zero.gemini.runs import Case, Training, batch, launch, net
from tests.zero.gemini.test_model import small

LIMIT = 1000 / 2**20


def check_shards(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    run = Training(Case(early=True))
    run.step(batch(0))
    model, compute = run.model, run.model.chunk_manager.compute
    expected = model.state_dict(only_rank_0=False)
    few = model.gemini_manager.limit() + max(c.nbytes for c in model.chunk_manager.chunks)
    assert few < sum(c.nbytes for c in model.chunk_manager.chunks) / 4
    for only_first in (True, False):
        found: dict[str, torch.Tensor] = {}
        shards = 0
        for shard in model.state_dict_shard("net.", max_shard_size=LIMIT, only_rank_0=only_first):
            shards += 1
            assert compute.used <= few, "more chunks are whole than come and go in training"
            sizes = {t.data_ptr(): size_of(t) for t in shard.values()}
            assert sum(sizes.values()) <= LIMIT or len(sizes) == 1
            assert found.keys().isdisjoint(shard)
            found |= shard
        assert shards > 5
        assert compute.used == 0
        if only_first and rank:
            assert not found
            continue
        assert found.keys() == {f"net.{name}" for name in expected}
        assert all(torch.equal(found[f"net.{name}"], t) for name, t in expected.items())
        assert found["net.head.weight"] is found["net.embed.weight"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_the_state_dict(ranks: int) -> None:
    spawn(check_shards, ranks)


def test_the_dtype_counts() -> None:
    model = small(net())
    whole, half = (
        len(list(model.state_dict_shard(max_shard_size=LIMIT, dtype=d))) for d in (None, torch.half)
    )
    assert half < 0.7 * whole
    (one,) = model.state_dict_shard(dtype=torch.half)
    assert one["embed.weight"].dtype is torch.half
    assert one["blocks.0.calls"].dtype is torch.int64


def test_whoever_stops_leaves_nothing_behind() -> None:
    model = small(net())
    shards = model.state_dict_shard(max_shard_size=LIMIT)
    next(shards)
    shards.close()  # type: ignore[attr-defined]
    assert not any(chunk.users for chunk in model.chunk_manager.chunks)
    with pytest.raises(ValueError, match=r"max_shard_size in MB, above 0; got 0"):
        model.state_dict_shard(max_shard_size=0)
