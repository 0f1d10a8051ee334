"""The site in a browser: no errors, nothing from outside, search from the disk, and a switch of languages."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs import reference, sidebar

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=8000"
)


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


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("size", ["1400,900", "390,844"])
@pytest.mark.parametrize(
    ("words", "page"), [("zero bubble", "pipeline.html"), ("ColoTensor", "colotensor.html")]
)
def test_search_from_the_disk(site: Path, tmp_path: Path, words: str, page: str, size: str) -> None:
    url = f"file://{site}/{sidebar.versions()[0]}/en/index.html?q={words.replace(' ', '+')}"
    flags = [*_FLAGS.split(), f"--window-size={size}", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *flags, url], capture_output=True, text=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    results = re.findall(r'class="md-search-result__link" href="([^"]+)"', done.stdout)
    results += re.findall(r'href="([^"]+)" class="md-search-result__link"', done.stdout)
    assert any(page in result for result in results), done.stdout[-2000:]
