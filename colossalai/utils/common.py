"""Small helpers that fit nowhere else: printing once, running once, contexts that may be off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from colossalai.logging import DistributedLogger
from colossalai.logging.rank import global_rank

P = ParamSpec("P")
R = TypeVar("R")


def print_rank_0(msg: str, logger: DistributedLogger | None = None) -> None:
    """Print on the first rank of the job only, or log there if a logger is given."""
    if global_rank() != 0:
        return
    if logger is None:
        print(msg, flush=True)
    else:
        logger.info(msg)


@contextmanager
def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Iterator[None]:
    """``context_manager`` if ``enable``, otherwise nothing."""
    if enable:
        with context_manager:
            yield
    else:
        yield


def disposable(func: Callable[P, R]) -> Callable[P, R | None]:
    """A function that runs at its first call only; later calls do nothing and return ``None``."""
    used = False

    @functools.wraps(func)
    def once(*args: P.args, **kwargs: P.kwargs) -> R | None:
        nonlocal used
        if used:
            return None
        used = True
        return func(*args, **kwargs)

    return once


def ensure_path_exists(filename: str | Path) -> None:
    """Create the directory that the file ``filename`` goes into."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
