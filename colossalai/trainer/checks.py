"""What a user may give the trainer, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from colossalai.trainer.batches import length
from colossalai.trainer.hooks import BaseHook


def check_fit(
    epochs: int, max_steps: int | None, test_interval: int, train_dataloader: Any, test_dataloader: Any
) -> None:
    """Refuse arguments of ``Trainer.fit`` that make no training."""
    for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
        if value is None and name == "max_steps":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"fit needs {name} as a whole number of at least 1, got {value!r}")
    check_dataloader("train_dataloader", train_dataloader, "fit")
    if test_dataloader is not None:
        check_dataloader("test_dataloader", test_dataloader, "fit")


def check_dataloader(name: str, dataloader: Any, who: str) -> None:
    """Refuse what cannot be iterated over, and what is known to have no batch."""
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        raise TypeError(
            f"{who} needs {name} as a data loader or another iterable of batches, got {dataloader!r}"
        )
    check_steps(1 if (known := length(dataloader)) is None else known, name)


def check_steps(steps: int, name: str) -> None:
    """Refuse a pass over ``name`` that had no batch."""
    if steps == 0:
        raise ValueError(
            f"{name} gave no batch: is the dataset empty, smaller than the batch size with drop_last=True, or an"
            " iterator that was used up before?"
        )


def check_hooks(hooks: Sequence[BaseHook]) -> None:
    """Refuse what is no hook, or cannot be put in order."""
    for hook in hooks:
        if not isinstance(hook, BaseHook):
            made = " (a class: call it)" if isinstance(hook, type) else ""
            raise TypeError(f"hooks inherit colossalai.trainer.hooks.BaseHook, got {hook!r}{made}")
        if not isinstance(hook.priority, (int, float)):
            raise TypeError(
                f"the priority of a hook is a number, but {type(hook).__name__} has {hook.priority!r}"
            )
