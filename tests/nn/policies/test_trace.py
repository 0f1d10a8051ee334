"""A plan is tried on the meta device: what it needs beside its rules is found, and what it cannot do is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai
from colossalai.mesh import Mesh
from colossalai.nn.policies import Cut, Policy
from colossalai.nn.policies.wrap_forward import UsedByPieces
from colossalai.testing import assert_equal_in_group, fake_world, spawn
from tests.nn.policies.zoo import launch

POLICY = Policy(("block",), {"up": Cut("expand"), "down": Cut("contract")})


class Block(nn.Module):
    """A table and a feed-forward block; what happens between its linears is written in ``inner``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return x.relu()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.table(input_ids))
        return self.after(self.down(self.inner(self.up(x), x)))

    def after(self, x: Tensor) -> Tensor:
        return x


def _cut(model: nn.Module, policy: Policy = POLICY) -> Any:
    with fake_world(rank=0, world_size=2):
        return colossalai.nn.parallelize(model, "1d", mesh=Mesh({"tp": 2}), policy=policy)


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.heads = (
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.zeros(())),
            nn.LayerNorm(4),
        )

    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        heads = self.heads(x.unflatten(-1, (-1, 4)))  # whole heads on each rank: the statistics are right
        return (heads * self.scale.exp()).flatten(-2)

    def after(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_parameters_on_pieces_are_found() -> None:
    model = _cut(Scaled())
    found = {name: m.used_names for name, m in model.named_modules() if isinstance(m, UsedByPieces)}
    assert found == {"": {"scale"}, "heads": {"weight", "bias"}}
    assert list(model.state_dict()) == list(Scaled().state_dict())


class Crossing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return x * self.gate(whole)


class Statistic(Block):
    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Softmax(Block):
    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 4)).softmax(-2).flatten(-2)  # over heads


class Both(Scaled):
    def after(self, x: Tensor) -> Tensor:
        return x * self.scale


class Sized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(16))

    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return x * self.scales


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Crossing, r"Crossing, module 'the model itself': an activation that all ranks hold meets features"),
        (
            Statistic,
            r"module 'the model itself': it takes a mean over features of which the plan leaves each",
        ),
        (Softmax, r"it takes a softmax over features of which"),
        (Both, r"parameter 'scale' is applied to activations that all ranks hold and to features of which"),
        (Sized, r"module 'the model itself': it works whole, but fails when the plan cuts .*\(RuntimeError"),
    ],
)
def test_plans_that_do_not_fit(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _cut(kind())


def test_layers_that_are_cut_in_the_wrong_order() -> None:
    twice = Policy(("block",), {"up": Cut("expand"), "down": Cut("expand")})
    with pytest.raises(
        ValueError, match=r"cuts 'down' as a layer that is given the whole of its input features"
    ):
        _cut(Block(), twice)
    backwards = Policy(("block",), {"up": Cut("contract"), "down": Cut("contract")})
    with pytest.raises(ValueError, match=r"cuts 'up' as a layer that is given a piece of its input features"):
        _cut(Block(), backwards)


class Unknown(Statistic):
    """Nobody knows its inputs, so it is not traced."""

    def forward(self, states: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(states["ids"])


def test_what_cannot_be_run_is_let_pass() -> None:
    _cut(Unknown())


def test_a_trace_leaves_no_trace() -> None:
    """Generators, hooks and parameters of the user are not touched."""
    model, seen = Scaled(), []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    before, state = dict(model.named_parameters()), torch.get_rng_state()
    _cut(model)
    assert not seen
    assert torch.equal(state, torch.get_rng_state())
    assert all(p is before[n] for n, p in model.named_parameters() if not n.startswith(("up", "down")))


# ---- dropout ----


class Dropping(Block):
    """Drops pieces between the linears and the whole behind them, in one forward."""

    def inner(self, x: Tensor, whole: Tensor) -> Tensor:
        return F.dropout(torch.ones_like(x), 0.5, self.training)

    def after(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def check_dropping(rank: int, world_size: int, port: int) -> None:
    launch({"size": 2, "mode": "1d"})
    torch.manual_seed(0)
    model = colossalai.nn.parallelize(Dropping(), policy=POLICY)
    seen: list[Tensor] = []
    model.down.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    ids = torch.zeros(4, 8, dtype=torch.long)
    out = model(ids)
    assert_equal_in_group(out.detach())
    assert (out == 0).any()
    assert_equal_in_group(torch.get_rng_state())
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0])
    assert not torch.equal(*both)
    model.eval()(ids)


def test_dropout_of_pieces_and_of_the_whole_in_one_forward() -> None:
    spawn(check_dropping, 2)
