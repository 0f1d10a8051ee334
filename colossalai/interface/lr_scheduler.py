"""``LRSchedulerWrapper``: a learning-rate scheduler that waits for an optimizer whose steps may be skipped.

A scheduler that is stepped in every iteration counts updates of the optimizer.  A step that fp16 skipped was
no update, so the scheduler must not count it: otherwise a warm-up is half over before the first weight has
moved.  Stepped once per epoch, it must go on whatever happened to the last iteration.  Both follow from one
rule: it stays where it is if nothing but skipped steps happened since it was last stepped.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from colossalai.interface.optimizer import OptimizerWrapper


class LRSchedulerWrapper(LRScheduler):
    """Everything of ``lr_scheduler``, but for ``step``, which does nothing where the optimizer did nothing.

    It is a ``LRScheduler`` to the eye of torch, and owns nothing: what is saved is the state of
    ``lr_scheduler``.
    """

    def __init__(self, lr_scheduler: LRScheduler, optimizer: OptimizerWrapper) -> None:
        # no super().__init__(): it would take the first step of a second schedule
        self.lr_scheduler = lr_scheduler
        self._boosted = optimizer
        self._updated = False
        optimizer.register_step_post_hook(self._see_update)

    def _see_update(self, *_: Any) -> None:
        self._updated = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless every step of the optimizer since the last call was skipped."""
        if self._updated or not self._boosted.step_was_skipped:
            self.lr_scheduler.step(*args, **kwargs)
        self._updated = False

    # The base class defines these, so __getattr__ would never be asked for them.

    def get_lr(self) -> Any:
        return self.lr_scheduler.get_lr()

    def get_last_lr(self) -> Any:
        return self.lr_scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.lr_scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr_scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "lr_scheduler":  # before __init__ (copy, pickle) there is no scheduler to ask
            raise AttributeError(f"this {type(self).__name__} wraps no scheduler yet")
        return getattr(self.lr_scheduler, name)
