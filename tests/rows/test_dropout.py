"""Masks differ over the axes that cut a tensor and are alike over the others, whatever kinds they are."""

from __future__ import annotations

import torch

import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, collectives, unshard
from colossalai.nn.layer.dropout import plan_independent_dropout
from colossalai.testing import spawn
from tests.rows.plans import launch

SHAPE = (2, 16, 8)
PLACES = {
    "whole": Layout(((), (), ())),
    "sp": Layout(((), ("sp",), ()), zigzag=frozenset({"sp"})),
    "tp": Layout(((), (), ("tp",))),
    "sp tp": Layout(((), ("sp",), ("tp",)), zigzag=frozenset({"sp"})),
}


def check_masks(rank: int, world_size: int, port: int) -> None:
    launch(sequence=2, tensor={"size": 2, "mode": "1d"})
    mesh, whole = gpc.mesh, torch.ones(SHAPE)
    for name, layout in PLACES.items():
        dropout = col_nn.Dropout(0.5, layout=layout)
        masks = [dropout(torch.ones(4, 4, 4)) for _ in range(2)]
        assert not torch.equal(*masks)
        for axis in ("sp", "tp"):
            one, other = collectives.all_gather(masks[0][None], mesh, axis, 0)
            assert torch.equal(one, other) is (axis not in name), (name, axis)
        assert torch.equal(dropout.eval()(whole), whole)
        dropout.train()
        piece = torch.ones([n // mesh.group_size(*axes) for n, axes in zip(SHAPE, layout.dims, strict=True)])
        with plan_independent_dropout(5):
            got = unshard(dropout(piece), layout, mesh)
        with plan_independent_dropout(5):
            assert torch.equal(got, col_nn.Dropout(0.5, layout=PLACES["whole"])(whole))
    alike = torch.rand(4)  # the shared generator went on alike
    for axis in ("sp", "tp"):
        assert torch.equal(*collectives.all_gather(alike[None], mesh, axis, 0))


def test_masks_follow_the_layout() -> None:
    spawn(check_masks, 4)
