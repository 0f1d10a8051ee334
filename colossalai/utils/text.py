"""Sizes and tables in words, for reports."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from numbers import Integral
from typing import SupportsIndex

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """1536 becomes 1.5 KiB."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.1f} {_UNITS[unit]}" if unit else f"{nbytes:.0f} B"


def bytes_of(size: SupportsIndex | str) -> int:
    """A number of bytes, such as an integer of numpy, or a text such as ``"1.5 KiB"``, ``"20 GiB"`` or
    ``"20 GB"``.
    """
    if isinstance(size, Integral) and not isinstance(size, bool) and int(size) >= 0:
        return int(size)
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(i?)b?\s*", size.lower())
        if found:
            base = 1024 if found[3] else 1000
            return int(float(found[1]) * base ** " kmgt".index(found[2] or " "))
    raise ValueError(f"a size is a number of bytes, or a text such as '20 GiB' or '500 MB', got {size!r}")


def table(rows: Sequence[Sequence[str]], indent: int = 0, right: Collection[int] = ()) -> list[str]:
    """Columns as wide as they must be; those in ``right`` hold numbers, which end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * indent
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
