"""A file for the time of one process: it has no name, so that not even a killed process leaves it behind.

Its data pass by the page cache (``O_DIRECT``) where the file system can do that.  Elsewhere it asks the system to drop what was
written or read, and says so once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from colossalai.utils.disk.memory import ALIGNMENT, aligned_empty, bytes_of

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)  # how systems say "I do not do that"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ScratchFile:
    """Direct reads and writes at any multiple of ``ALIGNMENT``; any number of threads may call at once."""

    fd = -1

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(tempfile.gettempdir() if directory is None else directory).absolute()
        if not self.directory.is_dir():
            raise ValueError(
                f"{self.directory} is no directory, so nothing can be offloaded there; create it, or name another one"
            )
        if sys.platform != "linux":
            raise RuntimeError(f"offloading to a disk needs Linux; this is {sys.platform}")
        self.size = 0
        self.fd = self._open()
        try:
            self.is_direct = self._set_direct()
        except OSError:
            self.close()
            raise
        if (kind := file_system(self.directory)) in MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"{self.directory} is in memory itself ({kind}): offloading to it saves nothing. Name a directory on a disk",
                stacklevel=2,
            )
        elif not self.is_direct:
            warnings.warn(
                f"the file system of {self.directory} ({kind}) has no direct I/O; what is offloaded there goes through the"
                " page cache, which is slower",
                stacklevel=2,
            )

    def _open(self) -> int:
        try:
            return os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in CANNOT:
                raise self._cannot_create(error) from error
        try:
            fd, path = tempfile.mkstemp(prefix="colossalai-", dir=self.directory)
        except OSError as error:
            raise self._cannot_create(error) from error
        os.unlink(path)
        return fd

    def _cannot_create(self, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"no file can be created in {self.directory} ({os.strerror(error.errno or 0)}); name a directory that you may write to",
        )

    def _set_direct(self) -> bool:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            block = aligned_empty(ALIGNMENT)
            os.pwritev(self.fd, [bytes_of(block.data_ptr(), ALIGNMENT)], 0)  # some refuse only here
        except OSError as error:
            if error.errno in FULL:
                raise self._full(ALIGNMENT, error) from error
            if error.errno not in CANNOT:
                raise self._failed("write", ALIGNMENT, 0, error) from error
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return False
        os.ftruncate(self.fd, 0)
        return True

    def grow(self, nbytes: int) -> None:
        """Take ``nbytes`` more of the disk now: a full disk is known before anything depends on it."""
        try:
            os.posix_fallocate(self.fd, self.size, nbytes)
        except OSError as error:
            if error.errno in FULL:
                os.ftruncate(self.fd, self.size)  # give back what was taken until then
                raise self._full(nbytes, error) from error
            if error.errno not in CANNOT:
                raise self._failed("allocate", nbytes, self.size, error) from error
            if nbytes > self.available():
                raise self._full(nbytes, OSError(errno.ENOSPC, "")) from error
            os.ftruncate(self.fd, self.size + nbytes)
        self.size += nbytes

    def available(self) -> int:
        """Bytes that are left on the disk."""
        found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def _full(self, nbytes: int, error: OSError) -> OSError:
        code = error.errno or errno.ENOSPC
        return OSError(
            code,
            f"no room to offload to {self.directory} ({os.strerror(code)}): {nbytes} bytes more are needed"
            f" beside the {self.size} of this file, {self.available()} are available. Free some, or offload less or elsewhere",
        )

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``."""
        self._transfer("write", os.pwritev, data, offset)

    def read(self, data: memoryview, offset: int) -> None:
        """Fill ``data``."""
        self._transfer("read", os.preadv, data, offset)

    def _transfer(self, what: str, call: Callable[..., int], data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):  # an interrupted call is repeated by Python; a short one here
            try:
                moved = call(self.fd, [data[done:]], offset + done)
            except OSError as error:
                raise self._failed(what, len(data) - done, offset + done, error) from error
            moved -= moved % ALIGNMENT
            if not moved:
                stopped = OSError(errno.EIO, "")
                raise self._failed(what, len(data) - done, offset + done, stopped)
            done += moved
        if not self.is_direct:
            os.posix_fadvise(self.fd, offset, len(data), os.POSIX_FADV_DONTNEED)

    def _failed(self, what: str, nbytes: int, offset: int, error: OSError) -> OSError:
        code = error.errno or errno.EIO
        return OSError(
            code,
            f"cannot {what} {nbytes} bytes at offset {offset} of the file (of {self.size} bytes) for offloading in"
            f" {self.directory}: {os.strerror(code)}",
        )

    def close(self) -> None:
        """Give the disk back."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.close()


def file_system(path: Path) -> str:
    """The kind of file system that holds ``path``, such as ext4, as far as the system tells."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"
