"""``ColossalaiOptimizer``: the contract of ``OptimizerWrapper`` under the names of the older interface."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossalai.interface.optimizer import OptimizerWrapper


class ColossalaiOptimizer(OptimizerWrapper):
    """``optim``, and what engines of the older interface call.

    Any optimizer can be put inside, also one of a plan.
    """

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """The backward pass of ``tensor``, whose gradient has come from where the loss is, with the loss
        scale in it.
        """
        self.expect_gradients()
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """``clip_grad_by_norm`` of what the optimizer trains; it knows its parameters, ``model`` is not
        asked.
        """
        return self.clip_grad_by_norm(max_norm)
