"""Attaches objects to a module of the user, for as long as that module lives.

A weak dictionary by module would keep both for ever, since what it remembers of a module holds the module.
An attribute of the module is part of a cycle, which Python's garbage collector frees.  It is neither copied
nor pickled with the module.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

ATTRIBUTE = "_colossalai_attached"


class Attached(dict[str, Any]):
    """The objects attached to one module, by name; a copy of the module has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        return Attached()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def attach(module: nn.Module | Optimizer, name: str, value: Any) -> None:
    """Keep ``value`` as long as ``module``."""
    vars(module).setdefault(ATTRIBUTE, Attached())[name] = value


def attached(module: nn.Module | Optimizer, name: str) -> Any:
    """What was attached to ``module`` under ``name``; None if nothing was."""
    return vars(module).get(ATTRIBUTE, {}).get(name)
