"""The norm of all gradients where row axes cut some parameters, and some ranks have no gradient of these."""

from __future__ import annotations

import torch
from torch import nn

import colossalai
from colossalai.mesh import Layout, Mesh, clip_grads, grad_norm, parameter
from colossalai.mesh.gradient_norm import tensor_axes
from colossalai.mesh.rows import (
    averaging_axes,
    averaging_choices,
    by_averaging_axes,
    row_axes,
    sequence_axes,
)
from colossalai.testing import spawn


def check_norm(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    mesh = Mesh({"dp": 1, "ep": 2, "pp": 1, "sp": 2, "tp": 1})
    assert (row_axes(mesh), sequence_axes(mesh), tensor_axes(mesh)) == (("dp", "ep", "sp"), ("sp",), ("tp",))
    whole = nn.Parameter(torch.ones(3))
    expert = parameter(nn.Parameter(torch.ones(4, 2)), Layout((("ep",), ())), mesh)
    old = nn.Parameter(torch.ones(2))
    old.is_tensor_parallel = True  # type: ignore[attr-defined]
    assert averaging_axes(expert, mesh) == ("dp", "sp")
    assert averaging_choices(mesh) == [("dp", "ep", "sp"), ("dp", "sp")]
    groups = by_averaging_axes([whole, expert, old], mesh)
    assert groups == {("dp", "ep", "sp"): [whole, old], ("dp", "sp"): [expert]}
    whole.grad = torch.full_like(whole, 2.0)
    if mesh.coord["ep"] == 1:  # no token came to the experts of the other ranks
        expert.grad = torch.full_like(expert, 3.0)
    expected = torch.tensor(3 * 4.0 + 4 * 9.0).sqrt()  # a copy counts once, of experts those of all ranks
    torch.testing.assert_close(grad_norm([whole, expert, old], mesh), expected)
    torch.testing.assert_close(clip_grads([whole, expert, old], 1.0, mesh), expected)
    torch.testing.assert_close(grad_norm([whole, expert, old], mesh), torch.tensor(1.0))


def test_groups_are_those_of_the_parameters() -> None:
    spawn(check_norm, 4)
