"""Nothing of a page is forgotten: its blocks are those of the document, and a test runs each of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documents.pages import PAGES, blocks, objects, objects_of

# The documents are not part of the repository; where we develop, they lie beside it (or beside its
# worktrees).
_BESIDE = [folder / "shared" / "spec" for folder in Path(__file__).resolve().parents[3:5]]
SPEC = next((folder for folder in _BESIDE if folder.is_dir()), None)

# What a page shows and a later issue builds.
LATER: dict[str, str] = {}

_FENCE = re.compile(r"^(`{1,3})(\w*)[ \t]*$")


class Block(NamedTuple):
    """Python of a document; without its end, the rest of the text up to the next block follows."""

    text: str
    ended: bool


def python_of(document: str) -> list[Block]:
    """Blocks start with three backquotes, or one, and ``python``, and end with as many backquotes if they end
    at all.
    """
    found: list[Block] = []
    lines: list[str] | None = None
    opening = ""
    for line in document.splitlines():
        fence = _FENCE.match(line)
        if fence and lines is not None and (fence[2] or fence[1] == opening):
            found.append(Block("\n".join(lines), ended=not fence[2]))
            lines = None
        if fence and fence[2].lower() == "python":
            opening, lines = fence[1], []
        elif lines is not None:
            lines.append(line)
    return found if lines is None else [*found, Block("\n".join(lines), ended=False)]


def written_as_in(document: Block, repaired: str) -> bool:
    """Are they the same but for white space?"""
    ours, theirs = ("".join(text.split()) for text in (repaired, document.text))
    return ours == theirs if document.ended else bool(ours) and theirs.startswith(ours)


def test_how_blocks_are_read() -> None:
    document = "```python\na\n```\n`python\nb\n`\n```bash\nls\n```\n```Python\nc\nwords\n```python\nd\n"
    assert python_of(document) == [
        Block("a", True),
        Block("b", True),
        Block("c\nwords", False),
        Block("d", False),
    ]
    assert written_as_in(Block("if a:\n\n\tb", True), "if a:\n    b\n")
    assert not written_as_in(Block("a = 1\nb = 2", True), "a = 1\n")
    assert written_as_in(Block("a = 1\nThen", False), "a = 1\n")
    assert not written_as_in(Block("a = 1", False), "")


@pytest.mark.skipif(SPEC is None, reason=f"the documents are not at {' or '.join(map(str, _BESIDE))}")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_holds_every_block_of_its_document(page: str) -> None:
    assert SPEC is not None
    (path,) = SPEC.glob(f"{page}-*.md")
    document = path.read_text()
    repaired = blocks(page)
    theirs = python_of(document)
    assert len(theirs) == len(repaired)
    assert [
        name for block, name in zip(theirs, repaired, strict=True) if not written_as_in(block, repaired[name])
    ] == []
    assert objects_of(page) == objects(document)


def test_every_block_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    used = set(re.findall(r'code\(\s*"(\d\d\.\w+)"', tests))
    assert used == {name for page in PAGES for name in blocks(page)}


@pytest.mark.parametrize("name", sorted({name for page in PAGES for name in objects_of(page)}))
def test_what_a_page_shows_is_there(name: str) -> None:
    module, _, rest = name.rpartition(".")
    parts = [rest]
    while module.rpartition(".")[2][0].isupper():  # a method: its class is not a module
        module, _, rest = module.rpartition(".")
        parts.insert(0, rest)
    found = importlib.import_module(module)
    if name in LATER:
        assert not hasattr(found, parts[0]), f"{name} is there: remove it from LATER"
        return
    for part in parts:
        found = getattr(found, part)
    assert found.__doc__
