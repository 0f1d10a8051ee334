"""The notebooks have the text of their pages, and a Jupyter kernel runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from docs import notebook
from docs.pages import ENGLISH, Page


@pytest.mark.parametrize("name", notebook.TUTORIALS)
def test_a_notebook_has_the_text_of_its_page(name: str) -> None:
    page = Page.read(ENGLISH / f"{name}.md")
    assert (notebook.FOLDER / f"{name}.ipynb").read_text() == notebook.text_of(page), (
        "run `python -m docs.notebook`"
    )


@pytest.mark.parametrize("name", notebook.TUTORIALS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nbclient", "ipykernel", "transformers"):
        pytest.importorskip(module, reason=f"needs `pip install {module}`")
    for variable in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    page = Page.read(ENGLISH / f"{name}.md")
    assert notebook.run(notebook.FOLDER / f"{name}.ipynb", page, tmp_path)
