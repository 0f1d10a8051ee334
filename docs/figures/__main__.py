"""``python -m docs.figures``: draw all pictures of the documentation again, in docs/source/en/figures."""

from __future__ import annotations

from docs.figures.layouts import all_layouts
from docs.figures.runs import all_runs
from docs.pages import ENGLISH

if __name__ == "__main__":
    all_layouts(ENGLISH / "figures")
    all_runs(ENGLISH / "figures")
