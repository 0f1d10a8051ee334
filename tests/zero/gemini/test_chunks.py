"""Tiers, chunks, the search for their size, states, the trace and the worker, one by one."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from colossalai.testing import parametrize_sample
from colossalai.zero.gemini import (
    STATE_TRANS,
    ChunkFullError,
    ChunkManager,
    OutOfCapacity,
    PlacementPolicyFactory,
    TensorState,
    Tier,
    init_chunk_manager,
    search_chunk_configuration,
)
from colossalai.zero.gemini.access_order import NEVER, AccessTrace
from colossalai.zero.gemini.chunk import ALIGN, Chunk, ChunkRanks, check_transition
from colossalai.zero.gemini.chunk_search import pack, search
from colossalai.zero.gemini.placement import AutoPlacementPolicy, ConstPlacementPolicy
from colossalai.zero.gemini.update_worker import UpdateWorker

CPU = torch.device("cpu")


def test_a_tier_counts_and_refuses() -> None:
    tier = Tier("compute", CPU, 100)
    tier.reserve(60, "weights")
    message = (
        r"the compute tier holds 60 of 100 bytes and has no room for gradients \(50 bytes\); give the tier"
        " more"
    )
    with pytest.raises(OutOfCapacity, match=message):
        tier.reserve(50, "gradients")
    tier.release(20)
    tier.reserve(50, "gradients")
    assert (tier.used, tier.peak, tier.free) == (90, 90, 10)


NUMELS = [[5, 30, 7, 1000, 3, 64, 64, 64, 2], [16] * 9, [1], [100, 1, 100, 1]]


@parametrize_sample(
    "numels, size, ranks", [(n, s, r) for n in NUMELS for s in (16, 64, 200) for r in (1, 2, 4)], n=12
)
def test_packing(numels: list[int], size: int, ranks: int) -> None:
    packing = pack(numels, size, ranks)
    assert sorted(i for chunk in packing.chunks for i in chunk) == list(range(len(numels)))
    assert all(chunk == tuple(sorted(chunk)) for chunk in packing.chunks)
    assert all(size % (ranks * ALIGN) == 0 for size in packing.sizes)
    assert packing.wasted == sum(packing.sizes) - sum(numels) >= 0
    assert f"{packing.wasted:,}" in packing.report(sum(numels))


def test_the_search_takes_the_size_with_the_least_waste() -> None:
    numels = [48] * 30
    best = search(numels, 64, 128, 16, 1)
    assert best.wasted == min(pack(numels, size, 1).wasted for size in range(64, 193, 16)) == 0
    assert best.size == 144  # the largest of equals


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_search_finds_what_packing_every_size_would(ranks: int) -> None:
    """Also where some parameters are larger than some of the sizes."""
    draw = random.Random(ranks)
    for smallest, span in ((16, 0), (64, 200), (300, 2000), (3000, 100)):
        for _ in range(20):
            numels = [draw.choice((0, 5, 64, draw.randrange(1500))) for _ in range(draw.randrange(1, 40))]
            found = search(numels, smallest, span, 16, ranks, filter_large=False)
            start = max(smallest, -(-max(numels) // ALIGN) * ALIGN if max(numels) <= smallest + span else 0)
            every = [pack(numels, size, ranks) for size in range(start, max(start, smallest + span) + 1, 16)]
            assert found == min(every, key=lambda packing: (packing.wasted, -packing.size))


def test_search_chunk_configuration() -> None:
    model = nn.Sequential(nn.Embedding(4096, 64), *[nn.Linear(64, 64) for _ in range(20)])
    total = sum(p.numel() for p in model.parameters())
    config, found, wasted = search_chunk_configuration(model, 0.05, 64, 0.02)
    assert found == total
    assert 0 <= wasted < 0.1 * total
    assert config.keys() == {1}
    assert config[1]["chunk_size"] * 2 >= 0.02 * 1024**2
    assert config[1]["keep_gathered"] is False
    with pytest.raises(ValueError, match="needs search_range_mb to be at least 0, got -1"):
        search_chunk_configuration(model, -1, 64)


def test_a_chunk_holds_what_fits() -> None:
    chunk = Chunk(64, None, torch.float32)
    chunk.append(nn.Parameter(torch.zeros(5)), "a")
    assert chunk.append(nn.Parameter(torch.zeros(30)), "b").offset == ALIGN
    with pytest.raises(ChunkFullError, match=r"'c' has 40 elements, but chunk 0 \(a .. b\) has room for 16"):
        chunk.append(nn.Parameter(torch.zeros(40)), "c")
    with pytest.raises(ValueError, match="shared by 3 ranks needs a size that is a multiple of 48, got 64"):
        Chunk(64, None, torch.float32, ranks=ChunkRanks(size=3))


def test_chunk_manager() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    manager = init_chunk_manager(
        model,
        search_range_mb=0.0,
        min_chunk_size_mb=80 * 2 / 1024**2,
        device="cpu",
        filter_exlarge_params=False,
    )
    for name, p in model.named_parameters():
        manager.register(p, name, torch.float32)
    manager.close_all_groups()
    assert [[s.name for s in c.slots] for c in manager.chunks] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    assert manager.get_chunk(model[1].bias) is manager.chunks[1]
    assert len(manager.get_chunks(model.parameters())) == 2
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is in no chunk"):
        manager.get_chunk(nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="for 2 data-parallel ranks, but 1 share the chunks"):
        _ = ChunkManager({2: {"chunk_size": 16}}, device="cpu").chunk_size
    assert "2 chunks" in manager.table()


@pytest.mark.parametrize("old", list(TensorState))
def test_states(old: TensorState) -> None:
    for new in TensorState:
        if old is new or (old, new) in STATE_TRANS:
            check_transition("w", old, new)
        else:
            with pytest.raises(
                RuntimeError, match=f"'w' cannot go from {old.name} to {new.name}; from {old.name}"
            ):
                check_transition("w", old, new)


def test_trace() -> None:
    trace = AccessTrace()
    for index in (0, 1, 1, 2, 2, 1, 0):
        trace.visit(index)
    assert max((0, 1, 2), key=trace.distance) == 2 or trace.distance(0) > trace.distance(2)
    trace.close()
    assert trace.order == [0, 1, 2, 1, 0]
    trace.begin()
    trace.visit(0)
    assert list(trace.ahead()) == [1, 2, 1, 0]
    assert trace.next_use(0) == 4
    trace.visit(2)  # 1 is left out
    assert trace.surprises == 1
    assert list(trace.ahead()) == [1, 0]
    trace.visit(7)  # never seen
    assert trace.next_use(2) == NEVER
    assert (trace.first_use(2), trace.first_use(7)) == (2, NEVER)


def test_the_worker_keeps_to_priorities() -> None:
    worker, done, gate = UpdateWorker(), [], threading.Event()
    worker.submit(0, 0, "first", gate.wait)
    for key, priority in ((1, 30), (2, 10), (3, 20)):
        worker.submit(key, priority, "chunk", lambda key=key: done.append(key))
    assert not worker.is_done(2)
    gate.set()
    worker.wait(1)
    assert done == [2, 3, 1]
    worker.wait_all()


def test_errors_of_the_worker_surface() -> None:
    worker = UpdateWorker()

    def fail() -> None:
        raise ValueError("no such number")

    worker.submit(5, 0, "chunk 5 (embed.weight)", fail)
    with pytest.raises(
        RuntimeError, match=r"the update of chunk 5 \(embed.weight\) failed: ValueError: no such number"
    ):
        worker.wait(5)
    with pytest.raises(RuntimeError, match="failed"):
        worker.submit(6, 0, "chunk 6", fail)


def test_a_script_that_ends_waits_for_the_update_at_hand() -> None:
    script = """
import threading
from colossalai.zero.gemini.update_worker import UpdateWorker
worker, begun = UpdateWorker(), threading.Event()
def update():
    begun.set()
    sum(range(3_000_000))
    print("updated", flush=True)
worker.submit(0, 0, "first", update)
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "updated\n"), done.stderr


def test_policies() -> None:
    assert PlacementPolicyFactory.get_policy_names() == ("cpu", "cuda", "auto", "const")
    with pytest.raises(ValueError, match="there is no placement policy 'disk'"):
        PlacementPolicyFactory.create("disk")
    with pytest.raises(ValueError, match=r"steady_cuda_cap_ratio is a share between 0 and 1, got 1.5"):
        AutoPlacementPolicy.set_steady_cuda_cap_ratio(1.5)
    with pytest.raises(ValueError, match="a number of MB above 0, got 0"):
        ConstPlacementPolicy.set_const_memory_boundary(0)
    assert PlacementPolicyFactory.get_default_device("cpu") == CPU
