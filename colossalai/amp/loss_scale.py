"""The seven arguments about the loss scale of fp16, which optimizers, plugins and config sections repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """How the loss scale of fp16 begins and moves; see ``DynamicGradScaler``, which refuses values that do
    not fit together.
    """

    initial_scale: float = 2**16
    min_scale: float | None = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float | None = 2**32

    def __post_init__(self) -> None:
        self.scaler()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> LossScaleOptions:
        """Take the options out of the ``arguments`` of a function, such as its ``locals()``."""
        return cls(**{name: arguments[name] for name in LOSS_SCALE})

    def scaler(self, verbose: bool = False) -> DynamicGradScaler:
        return DynamicGradScaler(**self.arguments(), verbose=verbose)

    def arguments(self) -> dict[str, Any]:
        """Return the options by the names of the arguments that optimizers take."""
        return {name: getattr(self, name) for name in LOSS_SCALE}


LOSS_SCALE = tuple(option.name for option in fields(LossScaleOptions))
"""The names of the arguments."""


def fix_loss_scale(options: dict[str, Any]) -> None:
    """Change ``options`` so that the loss scale keeps its first value, 1 unless given."""
    scale = options.setdefault("initial_scale", 1.0)
    options |= {"min_scale": scale, "max_scale": scale}
