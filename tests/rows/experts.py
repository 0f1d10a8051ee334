"""A mixture of experts, of which each rank holds some and computes with the tokens of all.

Every token goes to every expert, so that the parallel layer is exactly the serial one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossalai.mesh import Layout, Mesh, parameter
from colossalai.mesh.mesh import Axes
from colossalai.mesh.movement import gather, scatter
from colossalai.mesh.rows import expert_axes


class Experts(nn.Module):
    """``x + sum of g_e(x) * tanh(x W_e)``; of ``experts`` the first ``open_`` get tokens, by default all."""

    def __init__(self, width: int, experts: int, open_: int | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.weight = nn.Parameter(torch.randn(experts, width, width) / width)
        self.open = experts if open_ is None else open_
        self.axes: Axes = ()
        self.mesh: Mesh | None = None
        self.first = 0

    def share_out(self, mesh: Mesh) -> None:
        """Keep this rank's experts alone."""
        experts = len(self.weight)
        self.mesh, self.axes = mesh, expert_axes(mesh, experts)
        self.weight = parameter(self.weight, Layout((self.axes, (), ())), mesh)
        for axis in self.axes:
            self.first = self.first * mesh.size[axis] + mesh.coord[axis]
        self.first *= len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, self.gate(x).softmax(-1)], -1)
        for axis in reversed(self.axes):
            assert self.mesh is not None
            rows = gather(rows, axis, self.mesh)
        tokens, gates = rows.split([x.size(-1), rows.size(-1) - x.size(-1)], -1)
        y = tokens * 0
        for e in range(len(self.weight)):
            if self.first + e < self.open:
                y = y + gates[..., self.first + e, None] * (tokens @ self.weight[e]).tanh()
        for axis in self.axes:
            assert self.mesh is not None
            y = scatter(y, axis, self.mesh)
        return x + y
