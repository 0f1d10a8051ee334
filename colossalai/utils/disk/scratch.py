"""A scratch file, and the threads that move tensors between memory and it.

The file lasts for the time of one process and has no name, so that not even a killed process leaves it
behind.  Its data pass by the page cache (``O_DIRECT``) where the file system can do that.  Elsewhere
``ScratchFile`` asks the system to drop what was written or read, and warns once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Literal

from torch import Tensor

from colossalai.utils.disk.buffers import ALIGNMENT, Bounce, aligned_empty, bytes_of, padded

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)  # how systems say "I do not do that"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _make(directory: Path) -> None:
    """Make ``directory``, and its parents, if they are missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{directory} is not a directory and cannot be made ({os.strerror(error.errno or 0)}), so nothing"
            " can be offloaded there; create it, or name another one"
        ) from None


class ScratchFile:
    """Direct reads and writes at any multiple of ``ALIGNMENT``; any number of threads may call at once."""

    fd = -1

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(tempfile.gettempdir() if directory is None else directory).absolute()
        _make(self.directory)
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
                f"{self.directory} is in memory itself ({kind}): offloading to it saves nothing. Name a"
                " directory on a disk",
                stacklevel=2,
            )
        elif not self.is_direct:
            warnings.warn(
                f"the file system of {self.directory} ({kind}) has no direct I/O; what is offloaded there"
                " goes through the page cache, which is slower",
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
            f"no file can be created in {self.directory} ({os.strerror(error.errno or 0)}); name a directory"
            " that you may write to",
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
            f" beside the {self.size} of this file, {self.available()} are available. Free some, or offload"
            " less or elsewhere",
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
            f"cannot {what} {nbytes} bytes at offset {offset} of the file (of {self.size} bytes) for"
            f" offloading in {self.directory}: {os.strerror(code)}",
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


class Pending:
    """A transfer that is under way."""

    def __init__(self, requests: list[Future[None]], tensor: Tensor) -> None:
        self._requests = requests
        self._tensor: Tensor | None = tensor  # kept alive until no thread touches its memory any more

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def settle(self) -> None:
        """Return when the memory of the tensor is not touched any more, whether
        the transfer succeeded or failed.
        """
        if not self.done():
            wait_for(self._requests)
        self._tensor = None

    def wait(self) -> None:
        """Return when the transfer is complete; raise ``OSError`` if it failed."""
        self.settle()
        for request in self._requests:
            request.result()


class Mover:
    """Cuts transfers into requests and runs several of them at once."""

    def __init__(self, file: ScratchFile, threads: int, request_bytes: int) -> None:
        self.bytes = {"read": 0, "write": 0}
        self._file = file
        self._request_bytes = request_bytes
        self._lock = threading.Lock()
        self._bounce = Bounce(request_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")

    def submit(self, what: Literal["read", "write"], tensor: Tensor, offset: int) -> Pending:
        """Begin to read or write all bytes of a contiguous tensor."""
        return Pending(
            [
                self._pool.submit(self._move, what, tensor, part, offset + part, nbytes)
                for part, nbytes in self._parts(tensor.nbytes)
            ],
            tensor,
        )

    def _parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Where requests begin, and their sizes: whole blocks, and a last part that is none."""
        whole = nbytes - nbytes % ALIGNMENT
        for part in range(0, whole, self._request_bytes):
            yield part, min(self._request_bytes, whole - part)
        if nbytes > whole:
            yield whole, nbytes - whole

    def _move(
        self, what: Literal["read", "write"], tensor: Tensor, part: int, offset: int, nbytes: int
    ) -> None:
        address = tensor.data_ptr() + part
        is_aligned = not (address % ALIGNMENT or nbytes % ALIGNMENT)
        buffer = address if is_aligned else self._bounce.address()
        data = bytes_of(buffer, padded(nbytes))
        if what == "write":
            if not is_aligned:
                ctypes.memmove(buffer, address, nbytes)
            self._file.write(data, offset)
        else:
            self._file.read(data, offset)
            if not is_aligned:
                ctypes.memmove(address, buffer, nbytes)
        with self._lock:
            self.bytes[what] += nbytes

    def close(self) -> None:
        """Finish what is under way and give the disk back."""
        self._pool.shutdown(wait=True)
        self._file.close()

    def abandon(self) -> None:
        """The same without waiting, for the garbage collector.

        It may come while a thread holds any lock, so to wait for another thread could be to wait forever.
        What is under way holds its tensor, this mover and the file, which goes with the last of them.
        """
        self._pool.shutdown(wait=False)
