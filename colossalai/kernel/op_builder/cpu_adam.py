"""Adam for one tensor at a time, on its own device."""

from __future__ import annotations

from torch import Tensor

from colossalai.kernel.op_builder.columns import update_
from colossalai.kernel.optimizer.adam import adam_
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions


class CPUAdamOptimizer:
    """Steps a tensor with the options that each call names; only ``adamw_mode`` is chosen once.

    The other options of the constructor are those of the caller to keep, as in the documented interface.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2
        self.eps, self.weight_decay, self.adamw_mode = eps, weight_decay, adamw_mode

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        loss_scale: float = -1.0,
    ) -> None:
        """One update in place; ``step`` counts from 1.

        ``grad`` is divided by ``loss_scale`` if that is positive.
        """
        options = AdamOptions(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=self.adamw_mode,
            bias_correction=bool(bias_correction),
            div_scale=loss_scale,
        )
        update_(
            [[param], [grad], [exp_avg], [exp_avg_sq]],
            ["weights", "grads", "exp_avgs", "exp_avg_sqs"],
            lambda columns: adam_(AdamLists(**columns), step, options),
        )
