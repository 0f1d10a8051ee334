"""What a booster has boosted, for ``save`` and ``load``; it is let go with the objects of the training script."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from colossalai.checkpoint_io.run_state import Run, RunState
from colossalai.checkpoint_io.writing import Writer


class Runs:
    """Models with their companions, in the order in which they were boosted, as long as they live."""

    def __init__(self) -> None:
        self._of: list[tuple[Any, ...]] = []
        self.writer = Writer()

    def add(self, model: nn.Module, *companions: Any) -> None:
        self._of.append(tuple(None if part is None else weakref.ref(part) for part in (model, *companions)))

    def state(self, plan: dict[str, Any], extra: Mapping[str, Any]) -> RunState:
        """What is to be saved or loaded."""
        self._of = [parts for parts in self._of if parts[0]() is not None]
        if not self._of:
            raise RuntimeError(
                "this booster has boosted no model (that is still there), so it has nothing to save or load"
            )
        alive: list[Any] = [[None if part is None else part() for part in parts] for parts in self._of]
        return RunState([Run(*parts) for parts in alive], plan, extra)
