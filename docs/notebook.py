"""``python -m docs.notebook``: write the tutorials as notebooks, and ``--run`` them with a Jupyter kernel.

A notebook has the words and the code of its page: a block with the name of a file writes that file, commands
of the page are lines with ``!``.  So there is one text, and the notebooks cannot say something else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.pages import ENGLISH, ROOT, SHELL, Block, Page
from docs.test import WrongPage, first_missing

FOLDER = ROOT / "docs" / "notebooks"
TUTORIALS = ("quickstart", "fine_tuning", "choosing")
_MARKS = re.compile(r"^<!-- doc-test-code.*?^-->\n|^<!-- doc-test-.*?-->\n", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(((?!https?:|#)[^)]+)\)")


def cells(page: Page) -> Iterator[tuple[str, str]]:
    """The cells of a page: their kind and their text."""
    lines = page.text.splitlines(keepends=True)
    at = 0
    shown = {line for block in page.blocks if block.kind in SHELL for line in block.text.splitlines()}
    for block in page.blocks:
        if block.hidden or block.ignored is not None or block.title == "Output":
            continue
        if not (code := list(_code(block, page, shown))):
            continue
        yield "markdown", "".join(lines[at : block.line - 2])
        at = block.line + block.text.count("\n")
        yield from (("code", text) for text in code)
    yield "markdown", "".join(lines[at:])


def _code(block: Block, page: Page, shown: set[str]) -> Iterator[str]:
    if block.kind in SHELL:
        yield "\n".join(f"!{line}" for line in block.text.splitlines())
    elif block.file:
        yield f"%%writefile {block.file}\n{block.text}"
        yield from (f"!{c}" for c in page.commands if block.file in c.split() and c not in shown)
    elif block.kind == "python":
        yield block.text


def notebook(page: Page) -> dict[str, Any]:
    """The notebook of a page."""
    made = []
    for kind, text in cells(page):
        if kind == "markdown":
            text = _LINK.sub(r"](../source/en/\1)", _MARKS.sub("", text))
        if not text.strip():
            continue
        name = hashlib.sha256(f"{len(made)} {text}".encode()).hexdigest()[:8]
        cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.strip("\n")}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def text_of(page: Page) -> str:
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def run(path: Path, page: Page, folder: Path) -> str:
    """Run a notebook in ``folder``; return what it printed, or raise ``WrongPage``."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = str(ROOT)
    opened = nbformat.read(path, as_version=4)
    NotebookClient(opened, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in opened.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    for shown in page.outputs():
        if missing := first_missing(shown, printed.splitlines()):
            raise WrongPage(f"{path.name} does not print {missing!r}:\n{printed}")
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.notebook", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run them, instead of writing them")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in TUTORIALS:
        page, path = Page.read(ENGLISH / f"{name}.md"), FOLDER / f"{name}.ipynb"
        if not options.run:
            path.write_text(text_of(page))
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(run(path, page, Path(folder)))


if __name__ == "__main__":
    main()
