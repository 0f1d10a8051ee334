"""``BaseGradScaler``: a number by which losses are multiplied, and a rule that changes it.

The number is a plain float.  It meets a tensor only when a loss is multiplied by it, so a scaler belongs to
no device and can be made before one is chosen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from colossalai.logging import get_dist_logger


class BaseGradScaler(ABC):
    """A loss scale.

    Args:
        initial_scale: the first scale.
        verbose: log every change of the scale, on rank 0.
    """

    def __init__(self, initial_scale: float, verbose: bool = False) -> None:
        if not (0 < initial_scale < math.inf):
            raise ValueError(
                f"{type(self).__name__} needs a finite initial_scale above 0, got {initial_scale!r}"
            )
        self._scale = float(initial_scale)
        self._verbose = verbose

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return self._scale

    @property
    def inv_scale(self) -> float:
        """What its gradients are multiplied by."""
        return 1.0 / self._scale

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """An iteration ended; ``overflow`` tells whether a gradient was inf or nan."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scale = float(state_dict["scale"])

    def log(self, message: str) -> None:
        """Tell the user, if ``verbose``."""
        if self._verbose:
            get_dist_logger("colossalai.amp").info(message, ranks=[0])
