"""``python -m docs.translated_tables``: pages in Chinese get the tables that scripts write on English pages.

A table stands between two comments.  ``docs/glossary/tables.zh-Hans.json`` translates its few words;
numbers, code and errors stay as they are.
"""

from __future__ import annotations

import json
import re

from docs.pages import ENGLISH, ROOT, SOURCE

CHINESE = SOURCE / "zh-Hans"
WORDS: dict[str, dict[str, str]] = json.loads((ROOT / "docs/glossary/tables.zh-Hans.json").read_text())
_TABLE = re.compile(r"(<!-- (\w+): [^\n]*-->\n)(.*?)(<!-- (?:end of \2|\2: end) -->)", re.DOTALL)


def _translate(table: str, words: dict[str, str]) -> str:
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    found = re.compile(rf"(?<!\w)(?:{longest_first})(?!\w)")
    parts = re.split(r"(`[^`\n]*`)", table)
    parts[::2] = [found.sub(lambda match: words[match[0]], part) for part in parts[::2]]
    return "".join(parts)


def with_tables(name: str) -> str:
    """The Chinese page `name` with the tables of the English one."""
    english = {match[2]: match[3] for match in _TABLE.finditer((ENGLISH / f"{name}.md").read_text())}
    page = (CHINESE / f"{name}.md").read_text()
    return _TABLE.sub(lambda match: match[1] + _translate(english[match[2]], WORDS[name]) + match[4], page)


def write_tables(name: str) -> None:
    """Put the tables of the English page `name` on the Chinese page."""
    (CHINESE / f"{name}.md").write_text(with_tables(name))


if __name__ == "__main__":
    for page in WORDS:
        write_tables(page)
