"""Cosine annealing."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR as TorchCosineAnnealingLR


class CosineAnnealingLR(TorchCosineAnnealingLR):
    """From the optimizer's learning rate to ``eta_min`` along half a cosine, in ``total_steps`` steps.

    Other keywords are options of schedulers that this one may replace in a config (``warmup_steps`` ...); they have
    no effect here, and a warning says so.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(
                f"CosineAnnealingLR needs total_steps, the number of steps to anneal over, as an int of at least 1;"
                f" got {total_steps!r}"
            )
        if kwargs:
            warnings.warn(f"CosineAnnealingLR does not use {', '.join(sorted(kwargs))}", stacklevel=2)
        super().__init__(optimizer, T_max=total_steps, eta_min=eta_min, last_epoch=last_epoch)
