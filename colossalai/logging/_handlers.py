"""Where log records go: a rich console on a terminal, plain lines elsewhere, one file per rank on request."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FORMAT = "colossalai - %(name)s - %(levelname)s: %(message)s"


class PlainConsole(logging.StreamHandler):
    """Plain lines on whatever ``sys.stderr`` is at the moment (a test or a notebook may replace it)."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(FORMAT))

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the console follows sys.stderr")


def console_handler() -> logging.Handler:
    """Colours and wrapping for a person at a terminal, the documented plain format for a file or a pipe."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return PlainConsole()
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False, rich_tracebacks=True)
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


def file_handler(directory: str | Path, rank: int, mode: str, suffix: str | None) -> logging.FileHandler:
    """A handler that writes ``rank_{rank}[_{suffix}].log`` in ``directory``, which is created if needed."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"log_to_file needs a directory for its file per rank, but {directory} is a file")
    directory.mkdir(parents=True, exist_ok=True)
    name = f"rank_{rank}_{suffix}.log" if suffix else f"rank_{rank}.log"
    handler = logging.FileHandler(directory / name, mode=mode, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler
