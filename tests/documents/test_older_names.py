"""Scripts that were written at 4947fa0 find every name that its documentation and examples import."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

NAMES = (Path(__file__).parent / "names_at_4947fa0.txt").read_text().split()


def resolve(name: str) -> Any:
    """Import the longest module that ``name`` begins with, and look the rest up in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # the module is there, and lacks something else
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_is_still_there() -> None:
    missing = []
    for name in NAMES:
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []
