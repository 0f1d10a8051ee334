"""A loss scale that stays."""

from __future__ import annotations

from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import BaseGradScaler


class ConstantGradScaler(BaseGradScaler):
    """The same scale for ever.  An overflow still skips its step: a weight that is nan stays so."""

    def update(self, overflow: bool) -> None:
        pass
