"""Numbers of bytes for people."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """1536 becomes 1.5 KiB."""
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.1f} {UNITS[unit]}" if unit else f"{nbytes:.0f} B"
