"""Losses of models with experts: that of the task, and those of the routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.context.moe_context import MOE_CONTEXT
from colossalai.nn.loss.cross_entropy import CrossEntropyLoss


class MoeLoss(nn.Module):
    """``loss_fn`` of the outputs, plus ``aux_weight`` times the losses that balance the routers.

    Args:
        aux_weight: of the balancing losses of all layers of the last forward pass, added up.
        loss_fn: a class or function that is called with the further arguments and gives the loss, such as
            ``torch.nn.CrossEntropyLoss``.
        z_weight: of the router-z losses.
    """

    def __init__(
        self,
        aux_weight: float,
        loss_fn: Callable[..., Any],
        *args: Any,
        z_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, weight in (("aux_weight", aux_weight), ("z_weight", z_weight)):
            if not weight >= 0:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a number of at least 0, got {weight!r}"
                )
        self.loss_fn = loss_fn(*args, **kwargs)
        self.aux_weight, self.z_weight = aux_weight, z_weight

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the task for these outputs and labels, with those of the routers."""
        main: Tensor = self.loss_fn(*args, **kwargs)
        losses = MOE_CONTEXT.losses()
        if losses is None or (self.aux_weight == 0 and self.z_weight == 0):
            return main
        without = not losses.balance.requires_grad or MOE_CONTEXT.are_hidden
        if torch.is_grad_enabled() and main.requires_grad and without:
            raise RuntimeError(
                f"{type(self).__name__}: the losses of routers have no gradient. Either the forward pass"
                " ran without gradients, or layers are in a checkpoint with use_reentrant=True, which"
                " hides them: use use_reentrant=False; or all gates are frozen: pass aux_weight=0"
            )
        extra = self.aux_weight * losses.balance
        if self.z_weight:
            extra = extra + self.z_weight * losses.z
        return main + extra.to(main.dtype)


class MoeCrossEntropyLoss(MoeLoss):
    """``colossalai.nn.CrossEntropyLoss`` with the losses that balance the routers."""

    def __init__(self, aux_weight: float = 0.01, *args: Any, **kwargs: Any) -> None:
        super().__init__(aux_weight, CrossEntropyLoss, *args, **kwargs)
