"""What mkdocs asks while it builds the site: the table of contents, generated pages, and our marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs import reference, sidebar
from docs.pages import ENGLISH, SOURCE
from docs.pages import Page as Source
from docs.titles import with_titles

NAMES = {"en": "English", "zh-Hans": "简体中文"}
NOT_YET = "!!! note\n    本页尚未翻译。\n\n"
_HIDDEN = re.compile(r"^<!-- doc-test-code.*?^-->\n", flags=re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^\s*<!-- doc-test-.*-->\n?", flags=re.MULTILINE)
_OPTION = re.compile(r"<code>(--?\w[\w-]*(?: \w+)?)</code>")
_AUTODOC = re.compile(r"^\{\{ autodoc:([\w.]+) \}\}$", flags=re.MULTILINE)


def language_of(config: MkDocsConfig) -> str:
    return Path(config.docs_dir).name


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    language = language_of(config)
    config.nav = sidebar.navigation(language, list(reference.pages()))
    config.extra["language"] = language
    config.extra["alternate"] = True  # a list would make the theme ask for a sitemap, which a disk refuses
    config.extra["languages"] = [{"name": NAMES[lang], "lang": lang} for lang in NAMES]
    config.extra["versions"] = sidebar.versions()
    config.extra["shown_version"] = sidebar.versions()[0]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference and, in another language, what it takes from the English pages."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    if language_of(config) != "en":
        present = set(files.src_uris)
        for path in sorted(ENGLISH.rglob("*")):
            name = path.relative_to(ENGLISH).as_posix()
            if path.is_file() and name not in present:
                files.append(_borrowed(path, name, config))
    return files


def _borrowed(path: Path, name: str, config: MkDocsConfig) -> File:
    if path.suffix == ".md":
        return File.generated(config, name, content=NOT_YET + path.read_text())
    return File.generated(config, name, abs_src_path=str(path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path or page.file.src_uri)
    titled = with_titles(Source(source, markdown), language_of(config))
    shown = _MARK.sub("", _HIDDEN.sub("", titled))
    return _AUTODOC.sub(lambda found: reference.entry(found[1]), shown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark options of commands, which browsers would break after their dashes."""
    return _OPTION.sub(r'<code class="option">\1</code>', html)


def on_serve(server: Any, config: MkDocsConfig, builder: Any) -> Any:
    server.watch(str(SOURCE.parent / "sidebars.json"))
    return server
