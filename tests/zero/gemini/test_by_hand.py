"""The documented classes put together by hand: chunks, managers, models, and ordinary copies of these."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from colossalai.tensor import (
    ColoInitContext,
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from colossalai.testing import spawn
from colossalai.zero import GeminiDDP, get_static_torch_model
from colossalai.zero.gemini import (
    Chunk,
    ChunkManager,
    GeminiAdamOptimizer,
    GeminiManager,
    TensorState,
    ZeroDDP,
    init_chunk_manager,
    search_chunk_configuration,
)
from tests.zero.gemini.runs import launch


class Pair(nn.Module):
    """A table that is also the head, and a pair of layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.up, self.down = nn.Linear(6, 14), nn.Linear(14, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def pair() -> Pair:
    torch.manual_seed(3)
    return Pair()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10, (4, 5), generator=generator) for _ in range(3)]


def check_chain(rank: int, world_size: int) -> None:
    """ChunkManager(config) -> GeminiManager -> ZeroDDP shares chunks between all ranks, and trains."""
    serial = pair()
    adam = torch.optim.AdamW(serial.parameters(), lr=1e-2, eps=1e-4)
    for keep_gathered in (False, True):
        config, total, _ = search_chunk_configuration(
            pair(), 0.0, 16, 96 * 2 / 1024**2, filter_exlarge_params=False, strict_ddp_flag=keep_gathered
        )
        assert total == sum(p.numel() for p in serial.parameters())
        assert list(config) == [world_size]
        chunks = ChunkManager(config, init_device=GeminiManager.get_default_device("cpu"))
        manager = GeminiManager("cpu", chunks)
        model = ZeroDDP(pair(), manager, dtype=torch.float32)
        assert (chunks.ranks.size, manager.strict) == (world_size, keep_gathered)
        assert len(chunks.chunks) > 1
        optimizer = GeminiAdamOptimizer(model, lr=1e-2, eps=1e-4, weight_decay=1e-2, initial_scale=1)
        reference = copy.deepcopy(serial)
        adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4, weight_decay=1e-2)
        for ids in batches():
            adam.zero_grad()
            loss_of(reference, ids).backward()
            adam.step()
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, ids.chunk(world_size)[rank]))
            optimizer.step()
        for name, value in model.state_dict(only_rank_0=False).items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    wrong = GeminiManager("cpu", ChunkManager({world_size + 1: {"chunk_size": 64}}))
    with pytest.raises(ValueError, match=rf"is for {world_size + 1} .* but {world_size} share the chunks"):
        ZeroDDP(pair(), wrong, dtype=torch.float32)


def check_chunks(rank: int, world_size: int) -> None:
    """Tensors in chunks, without a model."""
    pg = ProcessGroup()
    for group in (pg, pg.dp_process_group()):
        chunk = Chunk(128, group, torch.float32, "cpu", cpu_shard_init=True, keep_gathered=True)
        assert (chunk.ranks.size, chunk.shard_size, chunk.keep_gathered) == (world_size, 64, True)
    with pytest.raises(ValueError, match="needs a size that is a multiple of 32, got 65"):
        Chunk(65, pg, torch.float32)
    for place in (None, pg):  # the ranks of the launched job, and those of a process group
        manager = ChunkManager({world_size: {"chunk_size": 96}}, place)
        torch.manual_seed(4)
        tensors = [nn.Parameter(torch.randn(n)) for n in (50, 30, 40, 200)]
        values = [t.detach().clone() for t in tensors]
        with pytest.raises(ValueError, match=r"config_key=5, but 2 data-parallel ranks share a tensor"):
            manager.register_tensor(tensors[0], "weights", 5)
        for tensor in tensors:
            manager.register_tensor(tensor, "weights", world_size, cpu_offload=True, pin_memory=True)
        manager.close_all_groups()
        assert [[s.numel for s in c.slots] for c in manager.chunks] == [[50, 30], [40], [200]]
        assert manager.compute.used == 0
        assert manager.host.used == sum(c.shard_nbytes for c in manager.chunks)
        first = manager.get_chunk(tensors[0])
        manager.access_chunk(first)
        assert torch.equal(tensors[0].data, values[0])
        manager.trans_tensor_state(tensors[0], TensorState.COMPUTE)
        tensors[0].data.add_(1)
        manager.copy_tensor_to_chunk_slice(tensors[1], torch.zeros(30))
        with pytest.raises(RuntimeError, match="cannot go from COMPUTE to FREE"):
            manager.release_chunk(first)
        manager.fake_release_chunk(first)
        assert first.present
        manager.release_chunk(first)
        assert not first.present
        manager.move_chunk(first, "cpu:0")
        for unknown in ("meta", torch.device("xpu", 1)):
            with pytest.raises(ValueError, match=rf"rest on {manager.device} or cpu, got {unknown}"):
                manager.move_chunk(first, unknown)
        manager.access_chunk(first)
        assert torch.equal(tensors[0].data, values[0] + 1)  # what was written is kept
        assert not tensors[1].data.any()


def check_two_groups(rank: int, world_size: int) -> None:
    """The search packs parameters of two process groups by the number of ranks that share them."""
    with ColoInitContext(default_pg=ProcessGroup(tp_degree=world_size)):
        one = nn.Linear(8, 8)
    with ColoInitContext(default_pg=ProcessGroup(tp_degree=1)):
        two = nn.Linear(6, 6)
    model = nn.Sequential(one, two)
    config, total, _ = search_chunk_configuration(model, 0.0, 16, 16 / 1024**2)
    assert sorted(config) == [1, world_size]
    assert total == 72 + 42
    assert all(found["chunk_size"] >= 1 for found in config.values())
    with pytest.raises(ValueError, match="belong to 2 process groups; chunks need one for all"):
        init_chunk_manager(model)


def check_static(rank: int, world_size: int, tp: int) -> None:
    """The copy has plain whole parameters, also where ColoParameters are cut."""
    pg = ProcessGroup(tp_degree=tp)
    with ColoInitContext(default_pg=pg):
        model = pair()
    model.up.weight.note = "mine"
    for name, dim in {"up.weight": 0, "up.bias": 0, "down.weight": 1, "table.weight": 1}.items():
        param = model.get_parameter(name)
        assert isinstance(param, ColoParameter)
        spec = ShardSpec([dim], [tp]) if tp > 1 else ReplicaSpec()
        param.set_tensor_spec(spec, ComputeSpec(ComputePattern.TP1D))
    serial, ids = pair(), batches()[0]
    chunked = GeminiDDP(model, "cpu", dtype=torch.float32, min_chunk_size_mb=0, search_range_mb=0)
    torch.testing.assert_close(chunked(ids).data, serial(ids).data)
    for only_rank_0 in (True, False):
        static = get_static_torch_model(chunked, only_rank_0=only_rank_0)
        assert type(static) is Pair
        assert all(type(p) is nn.Parameter for p in static.parameters())
        assert static.head.weight is static.table.weight
        assert static.up.weight.note == "mine"  # type: ignore[attr-defined]
        if pg.dp_local_rank() == 0 or not only_rank_0:
            for name, value in static.state_dict().items():
                assert torch.equal(value, serial.state_dict()[name]), name
            assert type(static(ids)) is Tensor
        else:
            assert all(p.isnan().all() for p in static.parameters())
    GeminiDDP(static, "cpu", dtype=torch.float32)  # it is a model like any other


def check_one_model(world_size: int) -> None:
    """Names and gradients of chunks are those of one model, so a second one is refused."""
    chunks = ChunkManager({world_size: {"chunk_size": 512, "keep_gathered": False}})
    ZeroDDP(nn.Linear(4, 4), GeminiManager("cpu", chunks))
    with pytest.raises(
        ValueError, match=r"holds the chunks of a Linear already.* a ChunkManager .* for each"
    ):
        ZeroDDP(pair(), GeminiManager("cpu", chunks))


def _on_two_ranks(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    check_chunks(rank, world_size)
    check_two_groups(rank, world_size)
    check_static(rank, world_size, tp=1)
    check_static(rank, world_size, tp=2)
    check_chain(rank, world_size)
    check_one_model(world_size)


def test_by_hand() -> None:
    spawn(_on_two_ranks, 2)
