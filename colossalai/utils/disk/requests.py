"""Threads that move parts of tensors between memory and a scratch file."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Literal

from torch import Tensor

from colossalai.utils.disk.memory import ALIGNMENT, Bounce, bytes_of, padded
from colossalai.utils.disk.scratch import ScratchFile


class Pending:
    """A transfer that is under way."""

    def __init__(self, requests: list[Future[None]], tensor: Tensor) -> None:
        self._requests = requests
        self._tensor: Tensor | None = tensor  # alive until nobody touches its memory any more

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def settle(self) -> None:
        """Return when the memory of the tensor is not touched any more, whether the transfer succeeded or failed."""
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

        It may come while a thread holds any lock, so to wait for another thread could be to wait forever.  What is under way holds
        its tensor, this mover and the file, which goes with the last of them.
        """
        self._pool.shutdown(wait=False)
