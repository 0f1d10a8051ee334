"""Every page of the documentation runs as it is written; see `docs.test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.pages import ROOT, Page, pages
from docs.test import run

RUN = [page for page in [*pages(), Page.read(ROOT / "README.md")] if page.commands]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_and_prints_what_it_shows(page: Page, tmp_path: Path) -> None:
    run(page, tmp_path)
