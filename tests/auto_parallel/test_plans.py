"""Models that ``auto_checkpoint`` has changed, under DDP, ZeRO, Gemini and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import Arguments, CheckpointPlanner, auto_checkpoint
from colossalai.auto_parallel.checkpoint.blocks import set_modes
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.launchers import launch_from_torch
from colossalai.nn import parallelize
from colossalai.nn.optimizer import HybridAdam
from colossalai.pipeline import split_model
from colossalai.testing import assert_close, spawn
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.auto_parallel.models import IDS, gpt2

PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", placement_policy="cpu"),
}


def changed(model: nn.Module, ids: Tensor) -> nn.Module:
    """With modes of all kinds."""
    planner = CheckpointPlanner(model, {"input_ids": ids, "labels": ids}, device="h200")
    plan = planner.plan((2 * planner.least[2] + planner.whole) // 3)
    planner.apply(plan)
    assert len(set(plan.modes.values())) > 1
    return model


def _plugins(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({}, backend="gloo")
    ids = IDS.roll(rank, 1)
    for plugin in PLUGINS.values():
        found = []
        for plain in ("plain", "modes", "regions"):
            torch.manual_seed(0)
            model = gpt2(dropout=0.0).train()
            model = model if plain == "plain" else changed(model, ids)
            if plain == "regions":
                blocks = [f"transformer.h.{place}" for place in range(4)]
                set_modes(
                    model,
                    dict(zip(blocks, ("keep", "full", "keep", "full"), strict=True)),
                    [blocks, blocks[1:3]],
                )
            booster = Booster(plugin=plugin())
            boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
            losses = []
            for _ in range(3):
                loss = boosted(input_ids=ids, labels=ids).loss
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().float())
            found.append(losses)
        for losses in zip(*found, strict=True):
            for other in losses[1:]:
                assert_close(losses[0], other, rtol=1e-5, atol=1e-6)


SHARES: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, precision="bf16", reduce_bucket_size_in_m=0.01),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="bf16", reduce_bucket_size_in_m=0.01),
}


def _divided(rank: int, world_size: int, port: int) -> None:
    """What a rank needs in a real step is what was planned: its part of gradients and states."""
    launch_from_torch({}, backend="gloo")
    for name, plugin in SHARES.items():
        model, batch, optimizer = _trained(8)
        booster = Booster(plugin=plugin())
        planner = CheckpointPlanner(model, batch, optimizer=optimizer, plugin=booster.plugin, device="cpu")
        plan = planner.plan((planner.least[2] + planner.whole) // 2)
        assert plan.peak <= plan.budget
        planner.apply(plan)
        peak = 0
        with LiveBytes() as memory:
            memory.hold((*model.parameters(), *model.buffers(), *batch.values()))
            boosted, optimizer, *_ = booster.boost(model, optimizer)
            for _ in range(2):
                memory.peak = memory.now
                booster.backward(boosted(**batch).loss, optimizer)
                peak = memory.peak
                optimizer.step()
                optimizer.zero_grad()
        # buckets of ZeRO are counted as full all the time
        assert 0.85 * plan.peak < peak < 1.005 * plan.peak, name


def _trained(layers: int) -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = gpt2(layers, 96, dropout=0.0).train()
    ids = IDS.repeat(4, 2)
    return model, {"input_ids": ids, "labels": ids}, HybridAdam(model.parameters(), lr=1e-3)


def test_divided_weights_gradients_and_states() -> None:
    spawn(_divided, 2)


def _gemini(rank: int, world_size: int, port: int) -> None:
    """Chunks and activations share one budget: the more there is, the more chunks lie on the device, and
    the less is computed again.
    """
    launch_from_torch({}, backend="gloo")
    model, batch, optimizer = _trained(8)
    chunks = {"min_chunk_size_mb": 0.2, "search_range_mb": 0.1, "precision": "bf16"}
    ends = CheckpointPlanner(
        model,
        batch,
        optimizer=optimizer,
        plugin=GeminiPlugin(placement_policy="auto", **chunks),
        device="h200",
    )
    assert ends.step.share is not None
    low, high = ends.least[2], ends.whole + ends.step.share.movable
    found = []
    for memory in (low, high):
        model, batch, optimizer = _trained(8)
        plugin = GeminiPlugin(placement_policy="auto", **chunks)
        plan = auto_checkpoint(model, batch, memory, optimizer=optimizer, plugin=plugin, device="h200")
        assert plan.peak <= plan.budget
        room = plugin.model_options["compute_capacity"]
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, optimizer)
        for _ in range(3):
            booster.backward(boosted(**batch).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        compute = boosted.chunk_manager.compute
        assert compute.peak <= room
        found.append((plan.resting, compute.peak, -plan.seconds))
    assert found == sorted(found)
    assert found[0][1] < found[-1][1]


def test_gemini_shares_one_budget() -> None:
    spawn(_gemini, 2)


def test_with_booster() -> None:
    spawn(_plugins, 2)


class Scaled(nn.Module):
    """A block with weights of its own, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x) + self.shift)


def _own_weights(rank: int, world_size: int, port: int) -> None:
    """In a region, weights of the blocks themselves are fetched; FSDP2 would not, and refuses."""
    launch_from_torch({}, backend="gloo")
    names = [str(number) for number in range(6)]
    found = []
    for grouped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Scaled() for _ in range(4)), nn.Linear(16, 16), nn.Linear(16, 16))
        if grouped:
            set_modes(model, dict.fromkeys(names, "keep"), [names[:5], names[1:3]])
            with pytest.raises(ValueError, match=r"one block at a time, but '0' .* regions=False"):
                Booster(plugin=TorchFSDPPlugin()).boost(model)
        chunks = {"min_chunk_size_mb": 0.0005, "search_range_mb": 0.001, "precision": "fp32"}
        booster = Booster(plugin=GeminiPlugin(placement_policy="cpu", **chunks))
        boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
        for step in range(3):
            torch.manual_seed(step + rank)
            loss = boosted(torch.randn(8, 16)).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    assert found[:3] == found[3:]


def test_own_weights_of_blocks_in_regions() -> None:
    spawn(_own_weights, 2)


def _cut(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, backend="gloo")
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = parallelize(gpt2())
        model = model if plain else changed(model, IDS)
        assert not model.first_step.done  # ranks still compare their first real step
        torch.manual_seed(1)
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    planner = CheckpointPlanner(gpt2(), {"input_ids": IDS, "labels": IDS}, device="h200")
    with pytest.raises(
        ValueError, match="is below the least" if rank == 0 else "on rank 0: .* below the least"
    ):
        planner.plan(1000 if rank == 0 else "1 GiB")


def _errors(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({}, backend="gloo")
    batch = {"input_ids": IDS, "labels": IDS}
    wrong: tuple[tuple[Any, Any, str], ...] = (
        ({"words": IDS}, "1 GiB", "cannot compute a loss of this batch"),
        (batch, "much", "memory: a size is a number of bytes"),
    )
    for bad, memory, message in wrong:
        begin = "found no plan on rank 1: auto_checkpoint: .*" if rank == 0 else "^auto_checkpoint: .*"
        given = (bad, memory) if rank == 1 else (batch, "1 GiB")
        with pytest.raises(ValueError, match=begin + message):
            auto_checkpoint(gpt2(), *given)
    assert auto_checkpoint(gpt2(), batch, "1 GiB").modes


def test_every_rank_raises_where_one_has_an_error() -> None:
    """Else the others would wait for it."""
    spawn(_errors, 2)


def test_with_tensor_parallelism() -> None:
    """The budget is that of a rank, and ranks choose alike."""
    spawn(_cut, 2)


def _stages(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}, backend="gloo")
    ids = IDS.repeat(8, 2)
    batch = {"input_ids": ids, "labels": ids}
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        stage = split_model(gpt2(dropout=0.0))
        if not plain:
            given: Any = {name: value[:8] for name, value in batch.items()}
            if rank == 1:
                hidden = torch.zeros(8, ids.size(1), 64, requires_grad=True)
                given = Arguments((hidden,), given)
            planner = CheckpointPlanner(stage, given, device="h200", stored=2 - rank)
            plan = planner.plan((planner.least[2] + planner.whole) // 2)
            planner.apply(plan)
            assert set(plan.modes.values()) != {"keep"}
        booster = Booster(plugin=TorchDDPPlugin())
        optimizer = HybridAdam(stage.parameters(), lr=1e-2)
        boosted, optimizer, *_ = booster.boost(stage, optimizer)
        losses = []
        for _ in range(3):
            out = booster.execute_pipeline(iter([batch]), boosted, None, optimizer, return_loss=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out["loss"])
        found.append(losses)
    if rank == 1:
        for a, b in zip(*found, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_with_a_pipeline() -> None:
    """A budget for each stage."""
    spawn(_stages, 2)
