"""The Python of the documents, one file of ``pages/`` for each page.

A file holds every block of its page, in the same order, with nothing changed but the indentation, which the
documents have lost; each has a name.  ``{{ autodoc:... }}`` are the objects that the page shows.
`test_inventory.py` compares the files with the documents, and makes sure that a test runs every block.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "pages"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))

_BLOCK = re.compile(r"^## (\w+)\n\n```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_OBJECT = re.compile(r"\{\{ autodoc:([\w.]+) \}\}")


def blocks(page: str) -> dict[str, str]:
    """The blocks of a page such as ``'21'`` by their full names, such as ``'21.config'``."""
    found = _BLOCK.findall(_text(page))
    named = {f"{page}.{name}": block for name, block in found}
    assert len(named) == len(found) == _text(page).count("```python"), f"the names in {page}.md differ"
    return named


def objects(text: str) -> list[str]:
    """The full names of the objects that ``text`` shows."""
    return _OBJECT.findall(text)


def objects_of(page: str) -> list[str]:
    return objects(_text(page))


def code(name: str, *changes: tuple[str, str]) -> str:
    """The block ``name``, such as ``'21.config'``, with these replacements of one piece of text by another.

    A test says here what it changes in a documented block: a number that would take hours, a placeholder, a
    mistake.
    """
    block = blocks(name[:2])[name]
    for old, new in changes:
        assert old in block, f"{name} has no {old!r}"
        block = block.replace(old, new)
    return block


def _text(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text()
