"""What a booster has boosted, for ``save`` and ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from colossalai.checkpoint_io.run_state import Run, RunState
from colossalai.checkpoint_io.writing import Writer


class Runs:
    """Models with their companions, in the order in which they were boosted.

    They stay as long as the booster does: a script may go on with the bare model, and a reference that does not keep the wrappers
    alive would forget a model without a word.
    """

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self.writer = Writer()

    def add(self, model: nn.Module, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> None:
        self._runs.append(Run(model, optimizer, lr_scheduler, dataloader))

    def state(self, plan: dict[str, Any], extra: Mapping[str, Any]) -> RunState:
        """What is to be saved or loaded."""
        if not self._runs:
            raise RuntimeError("this booster has boosted no model, so it has nothing to save or load")
        return RunState(self._runs, plan, extra)
