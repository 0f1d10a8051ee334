"""A loss scale that never changes."""

from __future__ import annotations

from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import BaseGradScaler


class ConstantGradScaler(BaseGradScaler):
    """A loss scale that never changes.  A step whose gradients overflow is still skipped."""

    def update(self, overflow: bool) -> None:
        pass
