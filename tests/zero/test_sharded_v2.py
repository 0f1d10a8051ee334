"""The older interface of ZeRO-3 trains as the serial model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.mesh import initialize
from colossalai.testing import spawn
from colossalai.zero import legacy
from colossalai.zero.legacy import (
    BucketTensorShardStrategy,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
    convert_to_zero_v2,
)
from tests.zero.gemini.runs import Case, Serial, batch, hybrid, launch, loss_of, net

SMALL = {"min_chunk_size_mb": 0.0005, "search_range_mb": 0.0005, "dtype": torch.float32, "device": "cpu"}


def check_training(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for policy in ("cpu", "cuda"):
        model, serial = net(), Serial(Case(clip=0.1))
        config = {"shard_strategy": TensorShardStrategy(), "tensor_placement_policy": policy, **SMALL}
        sharded, optimizer = convert_to_zero_v2(model, hybrid(model.parameters()), config, {})
        for step in range(3):
            words = batch(step)
            optimizer.backward(loss_of(sharded, words.chunk(world_size)[rank]))
            norm = optimizer.clip_grad_norm(sharded, 0.1)
            serial.step(words)
            optimizer.step()
            optimizer.zero_grad()
            assert norm > 0.1, "a test of clipping needs something to clip"
        found = sharded.state_dict(only_rank_0=False)
        for name, expected in serial.model.state_dict().items():
            if expected.is_floating_point():
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_serial_training(ranks: int) -> None:
    spawn(check_training, ranks)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(24, 8), nn.LayerNorm(8), nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(words)))


def test_models_are_built_without_memory_and_drawn_from_the_seed() -> None:
    count = torch.zeros(1, dtype=torch.int64)
    with ZeroInitContext("cpu", BucketTensorShardStrategy(), seed=7, model_numel_tensor=count):
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert count.item() == sum(p.numel() for p in model.parameters())
    assert not torch.empty(1).is_meta
    expected = initialize(copy.deepcopy(model), 7, device="cpu").state_dict()
    optimizer = hybrid(model.parameters())
    sharded = ShardedModelV2(model, TensorShardStrategy(), tensor_placement_policy="cpu", **SMALL)
    found = sharded.state_dict()
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    trained = ShardedOptimizerV2(sharded, optimizer)
    trained.backward(loss_of(sharded, batch(0)))
    trained.step()
    assert not torch.equal(sharded.state_dict()["embed.weight"], expected["embed.weight"])


def test_the_context_leaves_nothing_behind() -> None:
    with ZeroInitContext("cpu", TensorShardStrategy(), default_dtype=torch.float64):
        assert nn.Linear(2, 2).weight.dtype is torch.float64
    with pytest.raises(TypeError), ZeroInitContext("cpu", TensorShardStrategy()):
        nn.Linear()  # type: ignore[call-arg]
    layer = nn.Linear(2, 2)
    assert layer.weight.dtype is torch.float32
    assert not layer.weight.is_meta
    assert not vars(layer.weight)


def test_blocks_whose_weights_stay_whole_change_nothing() -> None:
    @legacy.no_shard_zero_decrator(is_replicated=True)
    def build() -> nn.Module:
        with legacy.no_shard_zero_context():
            return nn.Linear(3, 3)

    with ZeroInitContext("cpu", TensorShardStrategy()):
        assert build().weight.is_meta


def test_two_seeds() -> None:
    with ZeroInitContext("cpu", TensorShardStrategy(), seed=1):
        first = nn.Linear(2, 2)
    with ZeroInitContext("cpu", TensorShardStrategy(), seed=2):
        model = nn.Sequential(first, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parts of Sequential were built .* with the seeds \[1, 2\]"):
        ShardedModelV2(model, TensorShardStrategy())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"shard_strategy": "tensor"},
            TypeError,
            r"shard_strategy is TensorShardStrategy\(\) or .*got 'tensor'",
        ),
        ({"process_group": 1}, ValueError, r"launched plan and takes no process_group; leave it out"),
        ({"reduce_scatter_process_group": 1}, ValueError, r"takes no reduce_scatter_process_group"),
        ({"fp32_reduce_scatter": True}, ValueError, r"in its dtype, torch.bfloat16, and not in float32"),
        ({"tensor_placement_policy": "gpu"}, ValueError, r"there is no placement policy 'gpu'"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"shard_strategy": TensorShardStrategy(), "dtype": torch.bfloat16, **options}
    with pytest.raises(error, match=message):
        ShardedModelV2(nn.Linear(2, 2), **options)


def test_names() -> None:
    assert all(hasattr(legacy, name) for name in legacy.__all__)
