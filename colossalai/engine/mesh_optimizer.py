"""The optimizer of a model whose parameters are cut over ranks: its gradient norm is that of the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossalai.interface import OptimizerWrapper
from colossalai.mesh import Mesh, clip_grads, placement


class MeshOptimizer(OptimizerWrapper):
    """Everything of ``optim``, but for the norm: pieces on other ranks are counted, copies are counted once."""

    optim: OptimizerWrapper

    def __init__(self, optim: OptimizerWrapper, mesh: Mesh) -> None:
        super().__init__(optim)
        self.mesh = mesh

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.optim.backward(loss, *args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.optim.scale_loss(loss)

    def unscale_grad(self) -> None:
        self.optim.unscale_grad()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        self.unscale_grad()
        norm = clip_grads(self.parameters(), max_norm, self.mesh, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of all gradients is {float(norm)}; they cannot be clipped")
        return norm


def is_cut(optimizer: OptimizerWrapper) -> bool:
    """Whether any parameter of ``optimizer`` is a piece of a larger one."""
    return any(placement(p).sharded for p in optimizer.parameters())
