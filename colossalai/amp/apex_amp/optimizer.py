"""``ApexAMPOptimizer``: the gradients are unscaled as soon as a backward pass is over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossalai._numeric import HALF_DTYPES
from colossalai.amp.groups import maximum_over
from colossalai.amp.naive_amp import FP16Optimizer


class ApexAMPOptimizer(FP16Optimizer):
    """``FP16Optimizer`` whose ``backward`` leaves unscaled gradients in ``p.grad``, as ``amp.scale_loss`` of
    Apex does.

    Weights with an fp32 master (O2) keep the scaled gradient, which fp16 cannot hold otherwise; their
    masters get the unscaled one, in the step or when gradients are clipped.

    Before another pass adds to the gradients they are multiplied by the scale again, so that what is summed,
    by autograd and by DDP, has one scale.
    """

    _divided = False  # what is in ``p.grad`` of weights without a master

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._multiply_again()
        return super().scale_loss(loss)

    def expect_gradients(self) -> None:
        super().expect_gradients()
        self._multiply_again()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.is_scaled:
            self._multiply(self._without_master(), self.scaler.inv_scale)
            self._divided = True

    def unscale(self) -> Tensor:
        if not self._divided:
            return super().unscale()
        divided = self._without_master()
        known = {id(p) for p in divided}
        rest = [p for p in self.parameters() if id(p) not in known]
        # once more, since averaging after the backward pass may have brought an inf of another rank
        overflow = self._multiply(divided, 1.0)
        overflow = torch.maximum(overflow, self._multiply(rest, self.scaler.inv_scale))
        return maximum_over(overflow, self._groups)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        self._divided = False

    def _multiply_again(self) -> None:
        if self._divided:
            self._multiply(self._without_master(), self.scaler.scale)
            self._divided = False

    def _without_master(self) -> list[Tensor]:
        if self.masters is None:
            return self.parameters()
        masters = {id(p) for p in self.masters.masters()}
        # a half-precision weight that was set free a moment ago gets its master in the next step
        return [p for p in self.parameters() if id(p) not in masters and p.dtype not in HALF_DTYPES]
