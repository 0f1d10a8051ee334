"""Tables and heads that are whole along the vocabulary or the classes are cut along their features."""

from __future__ import annotations

WORD = 4
