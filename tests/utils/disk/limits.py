"""A disk that is full, for as long as a block of code runs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """No file may be larger than ``nbytes``: to a program the same as a full disk.

    Not a fixture: pytest itself writes between a test and the end of its
    fixtures, perhaps to a file that is larger.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
