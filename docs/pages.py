"""Pages of the documentation, and what their marks say.

============================================  =============================================================
mark                                          meaning
============================================  =============================================================
a block of ``python``                         a part of the page's script, ``PAGE.py``
a block with ``title="train.py"``             a file of its own
a block of ``text`` with ``title="Output"``   what the commands print: these lines, in this order; ``...``
                                              stands for anything
``print(...)  # words``                       prints these words
``<!-- doc-test-command: COMMAND -->``        is run in a folder with these files, at the end of the page
``<!-- doc-test-code`` ... ``-->``            a part of the script that readers do not see (or of a ``title``)
``<!-- doc-test-ignore-start: REASON -->``    what follows, up to ``<!-- doc-test-ignore-end -->``, is not run
============================================  =============================================================
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "source"
ENGLISH = SOURCE / "en"
LANGUAGES = ("en", "zh-Hans")
SHELL = frozenset({"sh", "bash", "shell", "console"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<kind>[\w+-]*)(?P<rest>[^`]*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMAND = re.compile(r"^<!-- doc-test-command: (.*?)\s*-->$")
_IGNORE = re.compile(r"^\s*<!-- doc-test-ignore-(start|end)(?::\s*(.*?))?\s*-->$")
_HIDDEN = re.compile(r"^<!-- doc-test-code(.*)$")
_PRINT = re.compile(r"^ *print\(.*\)  # (.*)$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, the line on which the text begins, and its title.

    ``ignored`` is the reason why it is not run; ``None`` says that it is.
    """

    kind: str
    text: str
    line: int
    title: str = ""
    ignored: str | None = None
    hidden: bool = False

    @property
    def file(self) -> str:
        """The file that holds the block alone, or nothing."""
        return self.title if re.fullmatch(r"[\w./-]+\.\w+", self.title) else ""


def plain(command: str) -> str:
    """A command as readers type it: without ``env NAME=VALUE``, which only makes its test quick."""
    return re.sub(r"^env (?:[A-Z_]+=\S* )+", "", command)


@dataclass(frozen=True)
class Page:
    """A file of Markdown."""

    path: Path
    text: str = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text())

    @property
    def name(self) -> str:
        """Its path below the folder of its language, without the suffix."""
        for language in LANGUAGES:
            if self.path.is_relative_to(SOURCE / language):
                return str(self.path.relative_to(SOURCE / language).with_suffix(""))
        return self.path.stem

    @property
    def script(self) -> str:
        return f"{Path(self.name).name}.py"

    @cached_property
    def blocks(self) -> list[Block]:
        return list(_Scanner(self.text.splitlines()).blocks())

    @cached_property
    def commands(self) -> list[str]:
        return [found[1] for line in self.text.splitlines() if (found := _COMMAND.match(line))]

    @property
    def prose(self) -> str:
        """The page without its blocks, comments and inline code."""
        lines = self.text.splitlines()
        for block in self.blocks:
            count = block.text.count("\n")
            lines[block.line - 2 : block.line + count] = [""] * (count + 2)
        return re.sub(r"<!--.*?-->|`[^`\n]*`", "", "\n".join(lines), flags=re.DOTALL)

    def files(self) -> dict[str, str]:
        """The files that the commands need, by name.

        A line of the script has the number that it has on the page, so that a traceback points at the page.
        """
        made: dict[str, str] = {}
        for block in self.blocks:
            if block.ignored is not None or not (block.file or block.kind == "python"):
                continue
            name = block.file or self.script
            before = made.get(name, "")
            gap = 0 if block.file else block.line - 1 - before.count("\n")
            made[name] = before + "\n" * gap + block.text
        return made

    def outputs(self) -> list[list[str]]:
        """What the commands print, one list of lines for each place that shows some."""
        shown = [block.text.splitlines() for block in self.blocks if block.title == "Output"]
        for block in self.blocks:
            if block.kind == "python" and block.ignored is None:
                shown += [[words] for words in _PRINT.findall(block.text)]
        return shown


def _title(words: str) -> str:
    found = _TITLE.search(words)
    return found[1] if found else ""


class _Scanner:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def blocks(self):  # type: ignore[no-untyped-def]
        ignored: str | None = None
        number = 0
        while number < len(self.lines):
            line = self.lines[number]
            if mark := _IGNORE.match(line):
                ignored = (mark[2] or "") if mark[1] == "start" else None
            elif mark := _HIDDEN.match(line):
                end = self._find(number + 1, "-->")
                yield Block("python", self._text(number + 1, end), number + 2, _title(mark[1]), hidden=True)
                number = end
            elif fence := _FENCE.match(line):
                end = self._find(number + 1, fence["ticks"])
                text = self._text(number + 1, end)
                yield Block(fence["kind"], text, number + 2, _title(fence["rest"]), ignored)
                number = end
            number += 1

    def _find(self, start: int, mark: str) -> int:
        for number in range(start, len(self.lines)):
            if self.lines[number].strip() == mark:
                return number
        raise ValueError(f"line {start}: what begins here has no {mark!r} at its end")

    def _text(self, start: int, end: int) -> str:
        return textwrap.dedent("".join(f"{line}\n" for line in self.lines[start:end]))


def pages(language: str = "en") -> list[Page]:
    """All pages in this language."""
    folder = SOURCE / language
    return [Page.read(path) for path in sorted(folder.rglob("*.md"))]
