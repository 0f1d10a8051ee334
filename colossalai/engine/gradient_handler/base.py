"""``BaseGradientHandler``: what happens to the gradients between the backward pass and the step of the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer


class BaseGradientHandler(ABC):
    """Synchronizes gradients over ranks.  The engine calls ``handle_gradient`` in each step, before it clips.

    Register your own with ``@GRADIENT_HANDLER.register_module`` and name it in the config:
    ``gradient_handler = [dict(type='MyGradientHandler')]``; further items of the dict go to its constructor.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._model = model
        self._optimizer: Any = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change the gradients in place; every rank calls this."""
