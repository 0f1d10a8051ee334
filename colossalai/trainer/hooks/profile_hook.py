"""``ProfileHook``: torch's profiler around some training steps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import schedule, tensorboard_trace_handler

from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.utils.profiler import profile

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


@HOOKS.register_module
class ProfileHook(BaseHook):
    """Profiles some training steps; each rank writes a trace to ``folder``, for TensorBoard, Perfetto or
    ``chrome://tracing``.

    Args:
        folder: where; the files are ``rank_{rank}.*.pt.trace.json``.
        skip: how many steps of the training come before; the first ones are slower.
        warmup: steps in which the profiler already runs, but nothing is kept: its start takes time.
        steps: how many are kept in a trace.
        options: more for ``torch.profiler.profile``, such as ``profile_memory=True`` or ``with_stack=True``.
    """

    def __init__(
        self,
        folder: str | Path,
        skip: int = 2,
        warmup: int = 1,
        steps: int = 3,
        priority: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(priority)
        if skip < 0 or warmup < 0 or steps < 1:
            raise ValueError(
                "ProfileHook skips 0 steps or more, warms up for 0 or more and keeps at least 1, got"
                f" skip={skip}, warmup={warmup} and steps={steps}"
            )
        self.folder, self.skip, self.warmup, self.steps = Path(folder), skip, warmup, steps
        self._options = options
        self._seen, self._block = 0, ExitStack()
        self._profiler: profile | None = None

    def before_train(self, trainer: Trainer) -> None:
        self._block.close()  # of a fit that failed
        self._seen = 0
        rank = gpc.get_global_rank() if torch.distributed.is_initialized() else 0
        plan = schedule(wait=self.skip, warmup=self.warmup, active=self.steps, repeat=1)
        self._profiler = self._block.enter_context(
            profile(
                schedule=plan,
                on_trace_ready=tensorboard_trace_handler(str(self.folder), f"rank_{rank}"),
                **self._options,
            )
        )

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._seen += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._seen == self.skip + self.warmup + self.steps:
            self._end()

    def after_train(self, trainer: Trainer) -> None:
        if self._seen <= self.skip + self.warmup:
            get_dist_logger().warning(
                f"ProfileHook kept nothing: it passes over {self.skip + self.warmup} steps, and there were"
                f" {self._seen}",
                ranks=[0],
            )
        self._end()

    def _end(self) -> None:
        self._block.close()
        self._profiler = None
