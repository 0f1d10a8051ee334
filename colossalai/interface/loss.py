"""Checks of a loss before its backward pass: one without gradient is refused, one that is nan is reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossalai.logging import get_dist_logger

# Reading a value from a CUDA device waits for it, so there the losses are looked at in bundles.
LOOK_EVERY = 32


def check_loss(loss: Any, who: str) -> None:
    """Refuse what has no backward pass; ``who`` was asked for it."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{who} needs the loss as one tensor, got {type(loss).__name__}; what does the criterion return?"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{who} needs a loss of one element, got a tensor of shape {tuple(loss.shape)}; take its mean or"
            " sum"
        )
    check_differentiable(loss)


def check_differentiable(tensor: Tensor) -> None:
    """Refuse a tensor that no parameter can learn from."""
    if not tensor.requires_grad:
        raise RuntimeError(
            "the loss does not depend on a parameter to train, so there is no backward pass: is the whole"
            " model frozen (requires_grad=False), or did the forward pass run under torch.no_grad()?"
        )


class LossWatch:
    """Looks at every loss, reports the first that is nan or infinite, and never changes one."""

    def __init__(self) -> None:
        self._seen = 0
        self._looked_at = 0
        self._bad: Tensor | None = None
        self._reported = self._skips_steps = False

    def see(self, loss: Tensor, skips_steps: bool = False) -> None:
        """Note a loss; ``skips_steps``: the optimizer takes no step with gradients that are not finite."""
        self._skips_steps = skips_steps
        self._seen += 1
        if self._reported:
            return
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad = bad if self._bad is None else self._bad | bad
        if loss.device.type == "cpu" or self._seen - self._looked_at == LOOK_EVERY:
            self.report()

    def report(self) -> None:
        """Warn if a loss since the last look was not finite, the first time that this happens."""
        if self._bad is None:
            return
        self._reported = bool(self._bad)
        first = self._looked_at + 1
        where = f"pass {first}" if first == self._seen else f"passes {first} to {self._seen}"
        self._bad, self._looked_at = None, self._seen
        if self._reported:
            outcome = (
                "the step is skipped; if it does not stay the only one, try"
                if self._skips_steps
                else "the weights may be lost; try"
            )
            get_dist_logger().warning(
                f"the loss is nan or infinite (backward {where}): {outcome} a lower learning rate,"
                " clip_grad_norm, or look at the data. Further ones are not reported"
            )
