"""``python -m docs.check``: what is wrong with the pages, one line each.

Every page is in the table of contents and in every language, or is listed in ``untranslated.txt``; links and
anchors lead somewhere; a translation has the code of the English page; and all code is run or says why not.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
from pymdownx.slugs import slugify

from docs import sidebar
from docs.pages import ENGLISH, LANGUAGES, ROOT, SHELL, SOURCE, Block, Page, pages, plain

UNTRANSLATED = SOURCE / "untranslated.txt"
_LINK = re.compile(r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?:\s+\{ ?#([\w.:-]+) ?\})?\s*#*$", flags=re.MULTILINE)
_SLUG = slugify(case="lower")


def problems() -> Iterator[str]:
    """All problems of all pages."""
    yield from in_the_sidebar()
    for language in LANGUAGES[1:]:
        yield from translated(language)
    everything = [page for language in LANGUAGES for page in pages(language)]
    for page in [*everything, *(Page.read(path) for path in sorted(ROOT.glob("README*.md")))]:
        for problem in (*links(page), *code(page)):
            yield f"{page.path.relative_to(ROOT)}: {problem}"


def in_the_sidebar() -> Iterator[str]:
    have, listed = {page.name for page in pages()}, [name for name in sidebar.listed() if "*" not in name]
    yield from (f"docs/sidebars.json: the page {name} is not listed" for name in sorted(have - set(listed)))
    yield from (f"docs/sidebars.json: there is no page {name}" for name in sorted(set(listed) - have))
    yield from (
        f"docs/sidebars.json: {name} is there twice" for name in sorted(set(listed)) if listed.count(name) > 1
    )


def untranslated() -> set[str]:
    """The pages, as ``LANGUAGE/NAME``, that wait for their translation."""
    lines = UNTRANSLATED.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def translated(language: str) -> Iterator[str]:
    have, waiting = {page.name: page for page in pages(language)}, untranslated()
    english = {page.name: page for page in pages()} | {"README": Page.read(ROOT / "README.md")}
    if (readme := ROOT / f"README-{language}.md").is_file():
        have["README"] = Page.read(readme)
    for name, page in english.items():
        if name not in have:
            if f"{language}/{name}" not in waiting:
                yield f"{language}/{name}.md is missing; write it, or list it in {UNTRANSLATED.name}"
        elif f"{language}/{name}" in waiting:
            yield f"{UNTRANSLATED.name} lists {language}/{name}, which is translated"
        elif _comparable(have[name]) != _comparable(page):
            yield f"docs/source/{language}/{name}.md: its code is not that of the English page"
    stale = {name for name in waiting if name.startswith(f"{language}/")} - {
        f"{language}/{n}" for n in english
    }
    yield from (f"{UNTRANSLATED.name} lists {name}, which is no page" for name in sorted(stale))
    yield from (
        f"docs/source/{language}/{name}.md has no English page" for name in sorted(set(have) - set(english))
    )


def _comparable(page: Page) -> list[str]:
    """The code that readers see, without its comments, which are translated."""
    shown = [block for block in page.blocks if not block.hidden and block.kind not in ("", "text", "console")]
    return [re.sub(r"(?m)\s*(?:^|\s)#(?!!).*$", "", block.text) for block in shown]


def links(page: Page) -> Iterator[str]:
    for image, target in _LINK.findall(page.prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        if path.startswith("reference/") or "/reference/" in path:
            continue  # made by docs/reference.py; mkdocs compares these links
        if not file.exists():
            borrowed = _english(file) if page.path.is_relative_to(SOURCE) else None
            if borrowed is None or not borrowed.exists():
                yield f"the {'picture' if image else 'link'} {target} leads nowhere"
                continue
            file = borrowed
        if anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"the link {target} leads to no heading; there are {', '.join(sorted(anchors(file)))}"


def _english(file: Path) -> Path | None:
    """What stands for a file that another language does not have."""
    for language in LANGUAGES[1:]:
        if file.is_relative_to(SOURCE / language):
            return ENGLISH / file.relative_to(SOURCE / language)
    return None


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page."""
    page = Page.read(path)
    lines = page.text.splitlines()
    for block in page.blocks:
        count = block.text.count("\n")
        lines[block.line - 2 : block.line + count] = [""] * (count + 2)
    found: list[str] = []
    for words, given in _HEADING.findall("\n".join(lines)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", words)
        slug = given or _SLUG(plain, "-")
        found.append(f"{slug}_{found.count(slug)}" if slug in found else slug)
    return set(found)


def code(page: Page) -> Iterator[str]:
    """What is neither run nor says why."""
    ours = page.path.is_relative_to(ENGLISH) or page.path.name == "README.md"
    for block in page.blocks:
        if block.ignored == "":
            yield f"line {block.line}: `doc-test-ignore-start` needs a reason: doc-test-ignore-start: REASON"
        if not ours:
            continue
        if block.kind in SHELL:
            for line in _commands(block):
                if why := refused(line, page, block.ignored is not None):
                    yield f"line {block.line}: `{line}` is not run by the page: {why}"
        if block.ignored is not None:
            continue
        if block.kind == "py":
            yield f"line {block.line}: write ```python; an excerpt stands between doc-test-ignore marks"
        if block.kind == "python" and not _is_run(block, page):
            yield f"line {block.line}: no doc-test-command runs this block"


def _is_run(block: Block, page: Page) -> bool:
    name = block.file or page.script
    return any(name in command for command in page.commands) or any(
        name != script and Path(name).stem in text for script, text in page.files().items()
    )


def _commands(block: Block) -> Iterator[str]:
    for line in block.text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if line and not line.startswith("#"):
            yield " ".join(line.split())


def refused(line: str, page: Page, excused: bool) -> str:
    """Why the command may be wrong: it is none of the page's, and has no excuse, or our command line would
    not read it.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        return str(error)
    typed = shlex.join(words)
    if any(shlex.join(shlex.split(plain(command))) == typed for command in page.commands):
        return ""
    if not excused:
        return "put it between doc-test-ignore marks with a reason, or make it a doc-test-command"
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:1] != ["colossalai"]:
        return ""
    from colossalai.cli.app import cli

    try:
        _read(cli, words[1:])
    except click.ClickException as error:
        return "" if "does not exist" in (message := error.format_message()) else message
    return ""


def _read(command: click.Command, words: list[str]) -> None:
    """Parse the words as the command line would, without running anything; a file need not exist."""
    if not isinstance(command, click.Group):
        command.make_context(command.name, list(words))
    elif words and not words[0].startswith("-"):
        if (child := command.get_command(click.Context(command), words[0])) is None:
            raise click.UsageError(f"there is no command {words[0]!r}")
        _read(child, words[1:])


def main() -> None:
    found = list(problems())
    print("\n".join(found) or "no problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
