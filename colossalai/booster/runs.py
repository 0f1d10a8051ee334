"""What a booster has boosted, for ``save`` and ``load``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
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

    def state(
        self, path: str | Path, plan: dict[str, Any] | None = None, extra: Mapping[str, Any] | None = None
    ) -> RunState:
        """What is to be saved to ``path``, or loaded from it."""
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(
                f"booster.save and load take the folder of the checkpoint, a str or Path; got {path!r}"
            )
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(
                f"booster.save takes extra, a dict of further values, after the path; got {extra!r}"
            )
        if not self._runs:
            raise RuntimeError("this booster has boosted no model, so it has nothing to save or load")
        return RunState(self._runs, plan or {}, extra or {})
