"""Placed parameters, their copies, and the norm of their gradients."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from colossalai.mesh import (
    Layout,
    Mesh,
    clip_grads,
    full_shape,
    grad_norm,
    parameter,
    place,
    placement,
    shard,
)
from colossalai.testing import fake_world, spawn
from tests.mesh.world import start

CUT = Layout((("tp",), ()))


def test_copies_lie_where_the_original_lies() -> None:
    with fake_world(rank=1, world_size=2):
        mesh = Mesh({"tp": 2})
        layer = nn.Linear(4, 6)
        layer.weight = parameter(layer.weight, CUT, mesh)
        place(layer.bias, Layout(((),)), (6,))
        tied = nn.ModuleList([layer, layer])
        twin = copy.deepcopy(tied)
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight is not layer.weight
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for other in (twin[0], loaded):
            assert isinstance(other.weight, nn.Parameter)
            assert placement(other.weight) == CUT
            assert full_shape(other.weight) == (6, 4)
            assert torch.equal(other.weight, layer.weight)


def _norms(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    mesh = Mesh({"dp": 2, "tp": 2})
    generator = torch.Generator().manual_seed(0)
    layouts = [CUT, Layout((("tp",), ("dp",))), Layout(((), ())), Layout(((), ("dp", "tp")))]
    fulls = [torch.randn(4, 8, generator=generator) for _ in layouts]
    params = []
    for full, layout in zip(fulls, layouts, strict=True):
        p = parameter(torch.zeros_like(full).requires_grad_(), layout, mesh)
        p.grad = shard(full, layout, mesh)
        params.append(p)
    params.append(nn.Parameter(torch.zeros(3)))  # no gradient: not counted
    flat = torch.cat([f.flatten() for f in fulls])
    for order in (2.0, 1.0, 3.0, math.inf):
        expected = torch.linalg.vector_norm(flat, order)
        torch.testing.assert_close(grad_norm(params, mesh, order), expected)
    before = clip_grads(params, 0.5, mesh)
    torch.testing.assert_close(before, flat.norm())
    torch.testing.assert_close(grad_norm(params, mesh), torch.tensor(0.5))
    torch.testing.assert_close(clip_grads(params, 10.0, mesh), torch.tensor(0.5))  # small enough: left alone
    torch.testing.assert_close(grad_norm(params, mesh), torch.tensor(0.5))
    assert grad_norm([], mesh) == 0
    with pytest.raises(ValueError, match="max_norm of at least 0, got -1"):
        clip_grads(params, -1.0, mesh)
    with pytest.raises(ValueError, match="norm_type must be positive or inf, got 0"):
        grad_norm(params, mesh, 0)


def test_every_distinct_piece_is_counted_once() -> None:
    spawn(_norms, 4)
