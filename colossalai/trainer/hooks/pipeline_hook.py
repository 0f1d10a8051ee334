"""The hook that shows what the ranks of a pipeline do, and when."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossalai.logging import get_dist_logger
from colossalai.pipeline.recording import Recording, record_run
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


@HOOKS.register_module
class RecordPipelineHook(BaseHook):
    """Records some training steps of a pipeline (see ``colossalai.pipeline.record_run``), and logs their summary.

    Args:
        path: the file to write: a trace if its name ends in ``.json``, else a picture of the last recorded step.
        skip: how many steps of the training come before; the first ones are slower.
        steps: how many to record.
    """

    def __init__(self, path: str | Path, skip: int = 2, steps: int = 3, priority: int = 10) -> None:
        super().__init__(priority)
        if skip < 0 or steps < 1:
            raise ValueError(
                f"RecordPipelineHook skips 0 steps or more and records at least 1, got skip={skip} and steps={steps}"
            )
        self.path, self.skip, self.steps = Path(path), skip, steps
        self._seen = 0
        self._block, self._recording = ExitStack(), Recording()

    def before_train_iter(self, trainer: Trainer) -> None:
        if self._seen == self.skip:
            self._recording = self._block.enter_context(record_run())

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._seen += 1
        if self._seen == self.skip + self.steps:
            self._write()

    def after_train(self, trainer: Trainer) -> None:
        if self.skip < self._seen < self.skip + self.steps:  # the training was shorter
            self._write()
        elif self._seen <= self.skip:
            get_dist_logger().warning(
                f"RecordPipelineHook recorded nothing: it skips {self.skip} steps, and there were {self._seen}",
                ranks=[0],
            )

    def _write(self) -> None:
        self._block.close()
        get_dist_logger().info(self._recording.summary(), ranks=[0])
        if self.path.suffix == ".json":
            self._recording.trace(self.path)
        else:
            self._recording.picture(self.path)
