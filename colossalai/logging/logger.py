"""The logger of a distributed job: each call says which ranks speak, and where in the source it was made.

Every output has its own level: the console that of ``set_level``, each file that of its ``log_to_file``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from colossalai.logging.rank import global_rank, rank_in

# ---- Where log records go: a rich console on a terminal, plain lines elsewhere, one file per rank on request
# ----

FORMAT = "colossalai - %(name)s - %(levelname)s: %(message)s"
# a file is read later, away from the script that wrote it
FILE_FORMAT = f"{FORMAT} (%(pathname)s:%(lineno)d %(funcName)s)"


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
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    return handler


_LEVELS = {
    name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "NOTSET")
}

# The handlers that were made here; one that a user adds to the same logger is theirs.
_OURS: WeakSet[logging.Handler] = WeakSet()


class DistributedLogger:
    """A named logger whose calls can be limited to some ranks.

    ``ranks=[0]`` lets only rank 0 speak; with ``parallel_mode=ParallelMode.TENSOR`` as well, only the first
    rank of each tensor group.  Each call writes one record, which knows the place of the call; files show it
    behind the message.  Get one with ``get_dist_logger(name)``.
    """

    _instances: ClassVar[dict[str, DistributedLogger]] = {}

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """The one logger called ``name``."""
        if name not in DistributedLogger._instances:
            DistributedLogger._instances[name] = DistributedLogger(name)
        return DistributedLogger._instances[name]

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger = logging.getLogger(name)
        self._logger.propagate = False  # otherwise a root handler would write every line again
        for handler in self._own_handlers():  # of an earlier logger with this name
            self._remove(handler)
        self._console = console_handler()
        self._add(self._console)
        self._warned: set[str] = set()
        self.set_level("INFO")

    @property
    def name(self) -> str:
        return self._name

    def set_level(self, level: str | int) -> None:
        """The least severe level that the console shows: ``'DEBUG'``, ``'INFO'``, ``'WARNING'``,
        ``'ERROR'``.
        """
        self._console.setLevel(_level(level))
        self._follow_the_most_talkative_output()

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str | int = "INFO", suffix: str | None = None
    ) -> None:
        """Also write to ``path/rank_{rank}[_{suffix}].log``; ``path`` is a directory, created if needed."""
        if mode not in ("a", "w"):
            raise ValueError(
                f"log_to_file opens its file with mode 'a' (append) or 'w' (replace), got {mode!r}"
            )
        numeric_level = _level(level)
        handler = file_handler(path, global_rank(), mode, suffix)
        for known in self._own_handlers():  # a second call for the same file replaces the first
            if isinstance(known, logging.FileHandler) and known.baseFilename == handler.baseFilename:
                self._remove(known)
        handler.setLevel(numeric_level)
        self._add(handler)
        self._follow_the_most_talkative_output()

    def debug(self, message: str, parallel_mode: Any = None, ranks: Collection[int] | None = None) -> None:
        """Log at level DEBUG, on ``ranks`` of ``parallel_mode`` (``None``: all ranks)."""
        self._log(logging.DEBUG, message, parallel_mode, ranks)

    def info(self, message: str, parallel_mode: Any = None, ranks: Collection[int] | None = None) -> None:
        """Log at level INFO, on ``ranks`` of ``parallel_mode`` (``None``: all ranks)."""
        self._log(logging.INFO, message, parallel_mode, ranks)

    def warning(self, message: str, parallel_mode: Any = None, ranks: Collection[int] | None = None) -> None:
        """Log at level WARNING, on ``ranks`` of ``parallel_mode`` (``None``: all ranks)."""
        self._log(logging.WARNING, message, parallel_mode, ranks)

    def error(self, message: str, parallel_mode: Any = None, ranks: Collection[int] | None = None) -> None:
        """Log at level ERROR, on ``ranks`` of ``parallel_mode`` (``None``: all ranks)."""
        self._log(logging.ERROR, message, parallel_mode, ranks)

    def warning_once(
        self, message: str, parallel_mode: Any = None, ranks: Collection[int] | None = None
    ) -> None:
        """``warning``, but a message that this process has already given is not repeated."""
        if message not in self._warned:
            self._warned.add(message)
            self._log(logging.WARNING, message, parallel_mode, ranks)

    def _log(self, level: int, message: str, parallel_mode: Any, ranks: Collection[int] | None) -> None:
        if isinstance(ranks, int):
            raise TypeError(f"ranks is a list of ranks that log, got {ranks}; write ranks=[{ranks}]")
        if not self._logger.isEnabledFor(level):
            return
        if ranks is not None and rank_in(parallel_mode) not in ranks:
            return
        self._logger.log(level, "%s", message, stacklevel=3)  # the caller of `info` and its siblings

    def _own_handlers(self) -> list[logging.Handler]:
        return [handler for handler in self._logger.handlers if handler in _OURS]

    def _add(self, handler: logging.Handler) -> None:
        _OURS.add(handler)
        self._logger.addHandler(handler)

    def _remove(self, handler: logging.Handler) -> None:
        self._logger.removeHandler(handler)
        handler.close()

    def _follow_the_most_talkative_output(self) -> None:
        self._logger.setLevel(max(1, min(handler.level for handler in self._own_handlers())))


def _level(level: str | int) -> int:
    if isinstance(level, int):
        return level
    if level.upper() not in _LEVELS:
        close = get_close_matches(level.upper(), _LEVELS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(_LEVELS)}"
        raise ValueError(f"there is no log level {level!r}; {hint}")
    return _LEVELS[level.upper()]
