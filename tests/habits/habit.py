"""``habit``: a row of the table, written as a small function over a training script."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[Any], None]


@dataclass(frozen=True)
class Habit:
    """What users do, in words and in code.

    Args:
        title: the code that a user writes, as the page shows it.
        model, optimizer: what the script trains, by the names of ``models`` and ``script``.
        instead: what to write where it is refused.
        engine: False where the habit is one of ``Booster`` alone.
        compare: False where weights cannot be those of the serial model (dropout); ranks must still agree.
        breaks: whether a refusal leaves a job that others cannot go on with, since ranks do different things.
        tolerance: how far numbers may be from the serial ones.
        prepares: whether the habit calls ``prepare`` by itself, as one of what comes before ``boost`` does.
    """

    name: str
    theme: str
    title: str
    run: Run
    model: str = "net"
    optimizer: str = "sgd"
    instead: str = ""
    engine: bool = True
    compare: bool = True
    prepares: bool = False
    breaks: bool = False
    tolerance: float = 1e-4


_habits: dict[str, Habit] = {}


def habit(theme: str, title: str, **options: Any) -> Callable[[Run], Run]:
    """Add the function below as a row."""

    def add(run: Run) -> Run:
        if run.__name__ in _habits:
            raise ValueError(f"two habits are named {run.__name__}")
        _habits[run.__name__] = Habit(run.__name__, theme, title, run, **options)
        return run

    return add


def all_habits() -> dict[str, Habit]:
    """Every row, in the order of the page."""
    from tests.habits import rows

    for module in rows.ORDER:
        importlib.import_module(f"tests.habits.rows.{module}")
    missing = {m.name for m in pkgutil.iter_modules(rows.__path__)} - set(rows.ORDER)
    assert not missing, f"tests/habits/rows/__init__.py does not name {sorted(missing)}"
    return dict(_habits)
