"""Cross entropy of scores that are whole on this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colossalai.registry import LOSSES


@LOSSES.register_module
class CrossEntropyLoss(nn.Module):
    """``torch.nn.CrossEntropyLoss``: the mean over the batch, or with ``reduction=False`` the loss of each sample.

    Other arguments are those of torch's class.
    """

    def __init__(self, reduction: bool = True, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        kwargs["reduction"] = "mean" if reduction else "none"
        self.loss = nn.CrossEntropyLoss(*args, **kwargs)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets)
