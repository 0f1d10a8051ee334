"""Layers of one input are computed together, and nothing else is."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.kernel import thin_products
from colossalai.kernel.thin_products import Product, ThinProducts


class Block(nn.Module):
    """Queries, keys and values of one input; then an input that changes between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, n) for n in (8, 4, 4, 8, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o, first, second = self.layers
        y = q(x) * 0.5 + torch.cat([k(x), v(x)], -1)
        z = o(y)
        before = first(z)
        z.add_(1)
        return before + second(z)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each launch of the kernel had, which torch computes here."""
    seen: list[int] = []

    def one_row(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        seen.append(len(weights))
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    monkeypatch.setitem(sys.modules, "colossalai.kernel.triton_rows", SimpleNamespace(one_row=one_row))
    monkeypatch.setattr(
        sys.modules["colossalai.kernel"], "triton_rows", SimpleNamespace(one_row=one_row), raising=False
    )
    monkeypatch.setattr(thin_products, "_takes", lambda *_: True)
    return seen


@torch.no_grad()
def test_layers_of_one_input_are_one_launch(launches: list[int]) -> None:
    torch.manual_seed(0)
    model, plan = Block(), list[Product]()
    x = torch.randn(1, 1, 8)
    expected = model(x)
    for wanted in ([1] * 6, [3, 1, 1, 1], [3, 1, 1, 1]):
        launches.clear()
        with ThinProducts(plan):
            assert torch.equal(model(x), expected)
        assert launches == wanted
        assert [p.joins for p in plan] == [False, True, True, False, False, False]


@torch.no_grad()
def test_another_order_than_planned_is_computed_one_by_one(launches: list[int]) -> None:
    torch.manual_seed(0)
    model, plan = Block(), list[Product]()
    x = torch.randn(1, 1, 8)
    with ThinProducts(plan):
        model(x)
    launches.clear()
    with ThinProducts(plan):
        found = [model.layers[i](x) for i in (2, 0, 1, 2)]
    assert all(torch.equal(found[i], model.layers[n](x)) for i, n in enumerate((2, 0, 1, 2)))
