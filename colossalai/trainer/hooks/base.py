"""``BaseHook``: what a hook of the trainer may do, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


class BaseHook:
    """Override the moments of your interest.  Hooks with a smaller ``priority`` are called first.

    Hooks run on every rank.  A hook that communicates must do so on all of them.
    """

    priority: int = 10  # for hooks that do not call __init__ of this class

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """The trainer has taken this hook; ``trainer.states`` is new."""

    def before_train(self, trainer: Trainer) -> None: ...

    def after_train(self, trainer: Trainer) -> None: ...

    def before_train_epoch(self, trainer: Trainer) -> None: ...

    def after_train_epoch(self, trainer: Trainer) -> None: ...

    def before_train_iter(self, trainer: Trainer) -> None: ...

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None: ...

    def before_test(self, trainer: Trainer) -> None: ...

    def after_test(self, trainer: Trainer) -> None: ...

    def before_test_epoch(self, trainer: Trainer) -> None: ...

    def after_test_epoch(self, trainer: Trainer) -> None: ...

    def before_test_iter(self, trainer: Trainer) -> None: ...

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None: ...

    def init_runner_states(self, trainer: Trainer, key: str, val: Any) -> None:
        """Set ``trainer.states[key]``, unless another hook has."""
        trainer.states.setdefault(key, val)
