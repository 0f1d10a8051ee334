"""What scripts do out of habit with experts: tied weights, shared modules, masks, plain loops."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.nn.layer.moe import Experts, MoeLayer, Top1Router
from colossalai.testing import spawn


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def _layer(expert: Any, **options: Any) -> MoeLayer:
    return MoeLayer(8, 4, Top1Router(drop_tks=False), Experts(expert=expert, num_experts=4, **options))


def test_an_expert_may_use_a_weight_twice() -> None:
    torch.manual_seed(0)
    layer, x = _layer(Tied).double(), torch.randn(2, 3, 8).double()
    torch.manual_seed(0)
    plain = [Tied().double() for _ in range(4)]
    tokens = x.view(6, 8)
    weights, chosen = (tokens @ layer.gate_weight.T).softmax(-1).max(-1)
    expected = torch.stack([weights[i] * plain[int(chosen[i])](tokens[i]) for i in range(6)])
    got = layer(x)
    torch.testing.assert_close(got.view(6, 8), expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    weight: Any = layer.experts.a__weight
    used = [p.a.weight.grad if p.a.weight.grad is not None else torch.zeros(8, 8).double() for p in plain]
    torch.testing.assert_close(weight.grad, torch.stack(used))


def test_a_module_that_experts_share_is_refused() -> None:
    shared = nn.Linear(8, 8)

    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), shared)

    with pytest.raises(ValueError, match=r"all experts share 1\.weight"):
        _layer(expert)


def test_an_additive_mask_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got torch\.float32; of an additive mask"):
        _layer(lambda: nn.Linear(8, 8))(torch.randn(2, 3, 8), torch.zeros(2, 3))


def _plain_loop(**place: Any) -> None:
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, backend="gloo", verbose=False)
    layer, x = _layer(lambda: nn.Linear(8, 8)), torch.randn(2, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            layer(x)
    with pytest.warns(UserWarning, match=r"its model was not boosted.*Booster"):
        layer(x)
    layer = _layer(lambda: nn.Linear(8, 8))
    boosted, *_ = Booster(plugin="ddp").boost(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        boosted(x)


def test_a_plain_loop_is_told_that_nothing_averages() -> None:
    spawn(_plain_loop, 2)
