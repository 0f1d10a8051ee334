"""One save at a time in a folder: two jobs that were given the same path would remove each other's files.

The system gives up the lock of a process that ends, however it ends.  What is written in the file tells people, and the next save,
who has it: a lock that only the orphans of a dead process hold (workers of its data loader) is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

LOCK = ".lock"


class Lock:
    """The lock of one folder, taken once and released once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Take the lock of ``folder``; if another process has it, that is an error."""
        path = folder / LOCK
        while self._descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                self._take_over(path)
                continue
            except OSError:  # a file system without locks
                os.close(descriptor)
                return
            if _is_at(descriptor, path):
                self._path, self._descriptor = path, descriptor
            else:  # its owner has finished and removed it in between
                os.close(descriptor)
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    @staticmethod
    def _take_over(path: Path) -> None:
        """Remove a lock whose owner is gone."""
        owner = _owner(path)
        if owner.get("host") == socket.gethostname() and not _is_alive(owner.get("pid")):
            path.unlink(missing_ok=True)
            return
        raise RuntimeError(
            f"{path.parent} is being saved to by another job (process {owner.get('pid', 'unknown')} on"
            f" {owner.get('host', 'an unknown host')}); give each job a folder of its own, or wait for it"
        )

    def release(self) -> None:
        if self._descriptor is not None and self._path is not None:
            if _is_at(self._descriptor, self._path):
                self._path.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also of children that have it from a fork
            os.close(self._descriptor)
            self._descriptor = None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
