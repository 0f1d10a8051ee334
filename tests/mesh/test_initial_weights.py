"""The same seed gives bit-equal whole weights for the serial model and for every plan, also made as
pieces.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from colossalai.mesh import Layout, Mesh, initialize, place_parameters, placement, unshard
from colossalai.nn.modes import TensorParallel, mode_1d, mode_2d, mode_2p5d, mode_3d, with_data_parallel
from colossalai.testing import spawn
from tests.mesh.world import start
from titans.model.gpt import GPT

SEED = 42
PLANS: dict[str, TensorParallel] = {
    "1d": mode_1d(4),
    "2d": mode_2d(2),
    "2.5d": mode_2p5d(2, 2),
    "3d": mode_3d(2),
    "data-parallel": with_data_parallel(mode_1d(1), 4),
    "zero3": with_data_parallel(mode_1d(1), 4, shard_weights=True),
    "zero3-1d": with_data_parallel(mode_1d(2), 2, shard_weights=True),
}


def build() -> nn.Module:
    """The GPT of the zoo: ordinary torch modules that know nothing about plans."""
    return GPT(vocab_size=64, max_position_embeddings=8, hidden_size=16, num_heads=4, depth=2, padding_idx=3)


def layouts(tp: TensorParallel, model: nn.Module) -> dict[str, Layout]:
    """Megatron's way of cutting a transformer, in the words of any mode."""
    qkv = replace(tp.expand, fused=(1, 3)).transposed(), replace(tp.inner_feature, fused=(3,))
    table = {
        "word_embeddings.weight": tp.vocab,
        "position_embeddings.weight": Layout(((), tp.hidden.dims[-1])),
        "query_key_value.weight": qkv[0],
        "query_key_value.bias": qkv[1],
        "dense.weight": tp.contract.transposed(),
        "dense.bias": tp.feature,
        "dense_1.weight": tp.expand.transposed(),
        "dense_1.bias": tp.inner_feature,
        "dense_2.weight": tp.contract.transposed(),
        "dense_2.bias": tp.feature,
        "weight": tp.feature,  # of the norms
        "bias": tp.feature,
    }
    return {n: next(v for k, v in table.items() if n.endswith(k)) for n, _ in model.named_parameters()}


def _pieces(rank: int, world_size: int, port: int, plan: str) -> None:
    start(rank, world_size, port)
    tp = PLANS[plan]
    mesh = Mesh(tp.axes)
    serial = initialize(build(), SEED)
    torch.manual_seed(1000 + rank)  # what the ordinary generators hold must not matter
    with torch.device("meta"):
        model = build()
    place_parameters(model, layouts(tp, model), mesh)
    initialize(model, SEED, mesh)
    assert model.head.dense.weight is model.embed.word_embeddings.weight
    expected = dict(serial.named_parameters())
    for name, p in model.named_parameters():
        assert p.numel() == expected[name].numel() // mesh.group_size(*placement(p).sharded), name
        assert torch.equal(unshard(p, placement(p), mesh), expected[name]), name


@pytest.mark.parametrize("plan", PLANS)
def test_pieces_are_those_of_the_serial_model(plan: str) -> None:
    spawn(_pieces, math.prod(PLANS[plan].axes.values()), plan=plan)


def test_seeds_names_and_padding() -> None:
    model = initialize(build(), SEED)
    again = initialize(build(), SEED)
    other = initialize(build(), SEED + 1)
    for name, p in model.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
        random = "norm" not in name and "bias" not in name
        assert torch.equal(p, other.get_parameter(name)) is not random, name
    first, second = (model.blocks[i].mlp.dense_1.weight for i in (0, 1))
    assert not torch.equal(first, second)
    table = model.embed.word_embeddings.weight
    assert table[3].eq(0).all()
    assert table[4].ne(0).all()


def test_distributions_are_torchs_own_defaults() -> None:
    linear = initialize(nn.Linear(400, 300), SEED)
    bound = 1 / math.sqrt(400)
    assert linear.weight.abs().max() <= bound
    # the standard deviation of a sample of n uniform numbers is off by less than about 1 / sqrt(n),
    # relatively
    assert linear.weight.std().item() == pytest.approx(
        bound / math.sqrt(3), rel=4.5 / math.sqrt(linear.weight.numel())
    )
    conv = initialize(nn.Conv2d(8, 16, 3), SEED)
    assert 0.9 / math.sqrt(72) < conv.weight.abs().max() <= 1 / math.sqrt(72)


class Custom(nn.Module):
    """Not in the table: drawn by its own reset_parameters, under a generator keyed by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.register_buffer("table", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight)
        self.table.copy_(torch.arange(3.0))


def _custom(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"tp": 2})
    serial = initialize(nn.Sequential(Custom(), Custom()), SEED)
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = nn.Sequential(Custom(), Custom())
    place_parameters(model, {"1.weight": Layout((("tp",), ()))}, mesh)
    initialize(model, SEED, mesh)
    assert torch.equal(model[0].weight, serial[0].weight)
    assert torch.equal(unshard(model[1].weight, placement(model[1].weight), mesh), serial[1].weight)
    assert not torch.equal(serial[0].weight, serial[1].weight)
    assert torch.equal(model[1].table, torch.arange(3.0))


def test_modules_without_a_recipe_use_their_own_reset() -> None:
    spawn(_custom, 2)


def test_errors() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

    with pytest.raises(
        ValueError, match=r"nothing says how to draw the parameters of '0' \(Unknown\): call set_init\(param"
    ):
        initialize(nn.Sequential(Unknown()), SEED)
    with torch.device("meta"):
        lost = nn.Module()
        lost.register_buffer("table", torch.arange(3.0))
    with pytest.raises(
        ValueError, match=r"the buffer 'table' of 'the model' \(Module\) is on the meta device"
    ):
        initialize(lost, SEED)
    with pytest.raises(ValueError, match="the model has no parameter 'bais'; it has weight, bias"):
        place_parameters(nn.Linear(2, 2), {"bais": Layout(((),))}, None)
    with pytest.raises(ValueError, match=r"build the model under torch\.device"):
        place_parameters(nn.Linear(2, 2), {"bias": Layout(((),))}, None)
