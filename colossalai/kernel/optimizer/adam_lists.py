"""The arguments of an Adam update: tensors, and numbers of its formula (see ``kernel.optimizer.adam``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from colossalai.kernel.optimizer.lists import Lists


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW
    bias_correction: bool = True
    div_scale: float = -1.0  # gradients are divided by it if it is positive

    def corrections(self, step: int) -> tuple[float, float]:
        """c1 and c2 of the formula at the top."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**step, 1 - self.beta2**step


@dataclass(kw_only=True)
class AdamLists(Lists):
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]

    @property
    def changed(self) -> list[list[Tensor]]:
        """The columns that an update writes to: weights, their other form if they have one, and moments."""
        return [self.weights, self.tails or self.halves, self.exp_avgs, self.exp_avg_sqs]
