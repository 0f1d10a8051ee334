"""The table of contents, ``sidebars.json``, and the versions that the site has, ``versions.json``."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

from docs.pages import SOURCE

_FOLDER = SOURCE.parent


def sections() -> list[dict[str, Any]]:
    return json.loads((_FOLDER / "sidebars.json").read_text())["docs"]


def listed() -> list[str]:
    """The names of all pages in the table of contents, in its order."""
    return [name for section in sections() for name in section["items"]]


def versions() -> list[str]:
    """The versions on the site, the newest first."""
    return json.loads((_FOLDER / "versions.json").read_text())


def navigation(language: str, generated: list[str]) -> list[dict[str, list[str]]]:
    """The table of contents as mkdocs takes it; a pattern stands for the generated pages that fit."""
    return [
        {section["label"][language]: [path for item in section["items"] for path in _paths(item, generated)]}
        for section in sections()
    ]


def _paths(item: str, generated: list[str]) -> list[str]:
    return [path for path in generated if fnmatchcase(path, f"{item}.md")] if "*" in item else [f"{item}.md"]
