"""The mean of a loss over rows of which each rank has some."""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.mesh import Axes, Mesh
from colossalai.mesh.collectives import all_reduce


def row_loss(total: Tensor, target: Tensor, ignore_index: int, axes: Axes, mesh: Mesh) -> Tensor:
    """The part that this rank's rows have in the mean over all rows that count; ``total`` is their sum."""
    with torch.no_grad():
        counts = (target != ignore_index).sum().to(total.dtype)
        for axis in axes:
            counts = all_reduce(counts, mesh, axis)
    return total / counts
