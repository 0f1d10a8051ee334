"""The site in a browser: no errors, nothing from outside, search, and a switch of languages."""

from __future__ import annotations

import asyncio
import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from docs import reference, sidebar
from tests.documents.browser import CHROMIUM, browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs `pip install -r docs/requirements-doc-test.txt`")
    pytest.importorskip("material", reason="needs `pip install -r docs/requirements-doc-test.txt`")
    from docs.build import build_site

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "pages", dict)  # `make docs` has them; they take a minute
        build_site(folder)
    return folder


def test_the_switch_of_languages_keeps_the_page(site: Path) -> None:
    version = sidebar.versions()[0]
    page = (site / version / "en" / "concepts" / "cluster.html").read_text()
    links = re.findall(r'href="([^"]*)" class="md-select__link"', page)
    here = site / version / "en" / "concepts"
    assert [(here / link).resolve().relative_to(site).as_posix() for link in links] == [
        f"{version}/en/concepts/cluster.html",
        f"{version}/zh-Hans/concepts/cluster.html",
        f"{version}/en/concepts/cluster.html",  # this version
    ]
    assert (site / version / "zh-Hans" / "concepts" / "cluster.html").is_file()


def test_nothing_of_a_page_comes_from_outside(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', page.read_text()
        )
        assert [url for pair in loaded for url in pair if url.startswith(("http", "//"))] == []


def test_marks_are_not_shown(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if "doc-test-" in page.read_text()] == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def places(site: Path) -> Iterator[dict[str, str]]:
    """Where a browser finds the site: on the disk, and by HTTP."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"disk": f"file://{site}", "http": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("size", [(1400, 900), (390, 844)], ids=["desk", "phone"])
@pytest.mark.parametrize("place", ["disk", "http"])
def test_in_a_browser(places: dict[str, str], tmp_path: Path, place: str, size: tuple[int, int]) -> None:
    pytest.importorskip("tornado", reason="needs `pip install -r docs/requirements-doc-test.txt`")
    asyncio.run(_visit(f"{places[place]}/{sidebar.versions()[0]}", tmp_path, size))


_BROKEN = """[...document.querySelectorAll("td code")].filter(
    code => /^[-\\w]+$/.test(code.innerText) && code.getClientRects().length > 1
).map(code => code.innerText)"""


async def _visit(root: str, folder: Path, size: tuple[int, int]) -> None:
    """Search, look at a page, and change its language."""
    async with browser(folder) as tab:
        for words, page in (("zero bubble", "pipeline.html"), ("ColoTensor", "colotensor.html")):
            await tab.open(f"{root}/en/index.html?q={quote(words)}", *size)
            found = await tab.links(".md-search-result__link")
            assert any(link.startswith(f"{root}/en/{page}") for link in found), (words, found)
        await tab.open(f"{root}/en/concepts/cluster.html", *size)
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")  # nothing hangs over
        await tab.open(f"{root}/en/combinations.html", *size)
        assert await tab.value(_BROKEN) == []  # names stand on one line, in a table that can be moved
        await tab.open(f"{root}/en/serving.html", *size)
        assert await tab.value(_BROKEN) == []  # so do options
        await tab.open(f"{root}/en/concepts/cluster.html", *size)
        await tab.follow('.md-select__link[href*="zh-Hans"]')
        assert await tab.value("location.href") == f"{root}/zh-Hans/concepts/cluster.html"
        assert tab.complaints == []
        assert [url for url in tab.requested if not url.startswith((f"{root}/", "data:", "blob:"))] == []
