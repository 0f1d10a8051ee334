"""testing.md describes every helper."""

from __future__ import annotations

import colossalai.testing
from docs.pages import ENGLISH

PAGE = (ENGLISH / "testing.md").read_text()


def test_every_helper_is_described() -> None:
    assert [name for name in colossalai.testing.__all__ if f"`{name}" not in PAGE] == []
