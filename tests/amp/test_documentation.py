"""mixed_precision.md lists the precisions and the levels that there are."""

from __future__ import annotations

from colossalai.amp.apex_amp import LEVELS
from colossalai.booster.mixed_precision import PRECISIONS
from docs.pages import ENGLISH

PAGE = (ENGLISH / "mixed_precision.md").read_text()


def test_the_page_names_every_precision_and_level() -> None:
    for name, kind in PRECISIONS.items():
        assert f'| `"{name}"` | `{kind.__name__}` |' in PAGE
    for level in LEVELS:
        assert f'| `"{level}"' in PAGE
