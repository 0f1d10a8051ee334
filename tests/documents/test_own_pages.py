"""README.md and docs/ speak of the tree as it is: names, files, packages and pages."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

from docs import check
from docs.pages import ENGLISH, ROOT, Page, pages

PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
PAGES += [page.path for page in pages()]
NAME = r"\b(?:colossalai|titans|model_zoo)(?:\.(?!md\b)[A-Za-z_]\w*)+"


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            module = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        try:
            reduce(getattr, words[count:], module)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_of_ours_exists(page: Path) -> None:
    names = set(re.findall(NAME, page.read_text()))
    assert [name for name in sorted(names) if not _exists(name)] == []


def test_languages_the_table_of_contents_links_and_code() -> None:
    assert list(check.problems()) == []


@pytest.mark.parametrize(
    "page",
    [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(check.links(Page.read(page))) == []


def test_every_page_is_linked_from_the_first_one() -> None:
    index = (ENGLISH / "index.md").read_text()
    assert {page.name for page in pages() if f"]({page.name}.md" not in index} - {"index"} == set()


def test_the_architecture_names_every_package_and_every_file_that_it_names_exists() -> None:
    text = (ENGLISH / "architecture.md").read_text()
    here = ROOT / "colossalai"
    modules = {
        path.stem for path in here.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"
    }
    ours = {f"colossalai.{name}" for name in modules if not name.startswith("_")} | {"titans", "model_zoo"}
    assert {name for name in ours if f"`{name}`" not in text} == set()
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert {name for name in files if not any(path.match(name) for path in here.rglob("*.py"))} == set()
