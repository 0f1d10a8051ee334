"""What ``docs/source/en/architecture.md`` says about the code is true."""

from __future__ import annotations

import re
from pathlib import Path

import colossalai

PACKAGE = Path(colossalai.__file__).parent
PAGE = (PACKAGE.parent / "docs/source/en" / "architecture.md").read_text()


def _readers() -> set[str]:
    """The modules that import the global context, but for the one that defines it and the one that names
    it.
    """
    found = set()
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if re.search(r"^\s*from .* import .*\bglobal_context\b", file.read_text(), re.M):
            found.add(name)
    return found - {"colossalai", "colossalai.core"}


def test_places_that_read_the_global_context() -> None:
    listed = PAGE[PAGE.index("These places read `gpc`") : PAGE.index("## Decisions and their reasons")]
    places = set(re.findall(r"`(colossalai\.[\w.]+)`", listed))
    assert places
    readers = _readers()
    unlisted = [r for r in readers if not any(r == p or r.startswith(f"{p}.") for p in places)]
    assert not unlisted, "these modules read gpc and are not named in docs/source/en/architecture.md"
    unused = [p for p in places if not any(r == p or r.startswith(f"{p}.") for r in readers)]
    assert not unused, "docs/source/en/architecture.md names these, but they do not read gpc"
