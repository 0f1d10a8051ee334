"""The models that a booster has boosted, with their companions, for ``save`` and ``load``."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from colossalai.checkpoint_io.files.gathering import remember_model
from colossalai.checkpoint_io.runs.run_state import BoostedRun, RunState
from colossalai.checkpoint_io.runs.writing import Writer
from colossalai.interface.attached import attach


class Runs:
    """Models with their companions, in the order in which they were boosted.

    They stay as long as any module of the model does: a script may go on with the bare model, or a part of
    it, and its wrappers would be forgotten without a word.  When no module is referenced any more, all are
    freed.
    """

    def __init__(self) -> None:
        self._runs: list[weakref.ref[BoostedRun]] = []
        self.writer = Writer()

    def add(self, model: nn.Module, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> None:
        run = BoostedRun(model, optimizer, lr_scheduler, dataloader)
        for module in model.modules():
            attach(module, "run", run)
        if optimizer is not None:
            remember_model(optimizer, model)
        self._runs = [known for known in self._runs if known() is not None]
        self._runs.append(weakref.ref(run))

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
        runs = self._alive()
        if not runs:
            raise RuntimeError(
                "this booster has boosted no model that still exists, so it has nothing to save or load"
            )
        return RunState(runs, plan or {}, extra or {})

    def _alive(self) -> list[BoostedRun]:
        if len(self._runs) > 1:
            gc.collect()  # or ranks would have different ones, as their collectors have come by or not
        return [run for known in self._runs if (run := known()) is not None]
