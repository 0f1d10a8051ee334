"""Messages between the service and its ranks: frames of JSON with the bytes of tensors behind it.

Nothing that arrives is ever executed: a frame names values of a closed list of kinds, so a peer can send
wrong numbers but no code.  Over an inherited socket pair the kernel says who speaks; over a network both
ends prove that they know the job's secret, and every frame carries a code of it that also counts, so that
no frame is changed, repeated or left out.

A frame is its length (8 bytes), the length of the JSON text (4 bytes), that text, and the bytes of the
tensors in the order in which the text names them; over a network, 32 bytes of HMAC-SHA256 follow.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_FRAME = 1 << 31
"""Bytes; a longer frame is refused before memory is taken for it."""
Frame = list[bytes | memoryview]
_HEAD = struct.Struct(">QI")
_MAC = 32
_NONCE = 32
_JOINED = 1 << 16  # bytes that are copied together rather than sent one after the other
_PLAIN = {int, float, str, bool, type(None)}  # what JSON has itself; a list of these is taken as it is
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}


class WireError(RuntimeError):
    """A peer sent what is no frame, or does not know the secret of the job."""


def pack(value: Any) -> list[bytes | memoryview]:
    """``value`` as the text of a frame and the buffers behind it.

    It may hold None, bool, int, float, str, bytes, tensors, lists, tuples and mappings; any other object is
    refused with its type.
    """
    buffers: list[bytes | memoryview] = []
    text = json.dumps(_flatten(value, buffers), separators=(",", ":")).encode()
    return [text, *buffers]


def pack_frame(kind: str, value: Any = None) -> Frame:
    """A message as it is sent.  What cannot be sent is refused here, in the thread of who sends it."""
    text, *rest = pack([kind, value])
    size = len(text) + sum(len(piece) for piece in rest)
    if size > MAX_FRAME:
        raise WireError(f"a message of {size:,} bytes is over the limit of {MAX_FRAME:,}")
    return [_HEAD.pack(size, len(text)), text, *rest]


def unpack(text: bytes | memoryview, rest: memoryview) -> Any:
    """The value of a frame.  Tensors share the memory of ``rest``."""
    try:
        return _restore(json.loads(bytes(text)), _Reader(rest))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, RuntimeError) as error:
        raise WireError(f"a frame cannot be read: {type(error).__name__}: {error}") from error


def _flatten(value: Any, buffers: list[bytes | memoryview]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        buffers.append(bytes(value))
        return {"b": len(value)}
    if isinstance(value, Tensor):
        return _flatten_tensor(value, buffers)
    if isinstance(value, Mapping):
        return {"d": [[_flatten(k, buffers), _flatten(v, buffers)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"t": [_flatten(item, buffers) for item in value]}
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [_flatten(item, buffers) for item in value]
    raise TypeError(
        f"a message between a service and its ranks cannot hold {type(value).__module__}."
        f"{type(value).__qualname__}; it can hold tensors, numbers, texts, bytes, None, lists,"
        " tuples and dicts"
    )


def _flatten_tensor(value: Tensor, buffers: list[bytes | memoryview]) -> Any:
    if value.is_sparse or value.is_quantized or str(value.dtype).removeprefix("torch.") not in _DTYPES:
        raise TypeError(f"a message cannot hold a tensor of {value.dtype} and {value.layout}")
    flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    buffers.append(memoryview(flat.numpy().data))
    return {"x": [str(value.dtype).removeprefix("torch."), list(value.shape)]}


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or self._at + count > len(self._data):
            raise ValueError("it names more bytes than it has")
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece


def _restore(value: Any, reader: _Reader) -> Any:
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [_restore(item, reader) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "b":
        return bytes(reader.take(content))
    if kind == "x":
        return _restore_tensor(content, reader)
    if kind == "t":
        return tuple(_restore(item, reader) for item in content)
    if kind == "d":
        return {_restore(k, reader): _restore(v, reader) for k, v in content}
    raise ValueError(f"it holds a value of the unknown kind {kind!r}")


def _restore_tensor(content: Any, reader: _Reader) -> Tensor:
    name, shape = content
    dtype = _DTYPES[name]
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"it holds a tensor of the shape {shape}")
    data = reader.take(math.prod(shape) * dtype.itemsize)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class Channel:
    """One end of a connection; any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._keys: tuple[bytes, bytes] | None = None  # of what we send, of what we receive
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def authenticate(self, secret: bytes, *, accepts: bool, timeout: float = 10.0) -> None:
        """Prove to the peer that we know ``secret``, and let it prove the same.

        Each end draws a number; keys of the two directions follow from both and the secret, so a recorded
        conversation is of no use later.
        """
        self._socket.settimeout(timeout)
        try:
            own = os.urandom(_NONCE)
            self._socket.sendall(own)
            theirs = bytes(self._read(_NONCE) or b"")
            if len(theirs) != _NONCE:
                raise WireError("the peer left before it proved that it knows the secret of the job")
            first, second = (theirs, own) if accepts else (own, theirs)
            base = hmac.digest(secret, b"colossalai serving" + first + second, hashlib.sha256)
            up, down = (hmac.digest(base, name, hashlib.sha256) for name in (b"up", b"down"))
            self._keys = (down, up) if accepts else (up, down)
            self.send("hello")
            if self.receive(limit=1 << 12) != ("hello", None):
                raise WireError("the peer does not speak this protocol")
        except (OSError, WireError) as error:
            raise WireError(f"the peer did not prove that it knows the secret of the job: {error}") from error
        finally:
            self._socket.settimeout(None)

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message; waits while the peer does not read."""
        self.send_frame(pack_frame(kind, value))

    def send_frame(self, *frames: Frame) -> None:
        """As ``send``, of what ``pack_frame`` made; many small ``frames`` are one call of the system."""
        with self._lock:
            waiting, size = Frame(), 0
            for frame in frames:
                if self._keys is not None:
                    frame = [*frame, self._code(self._keys[0], self._sent, frame)]
                    self._sent += 1
                for piece in frame:
                    if size + len(piece) > _JOINED:
                        self._send_joined(waiting)
                        waiting, size = [], 0
                    waiting.append(piece)
                    size += len(piece)
            self._send_joined(waiting)

    def _send_joined(self, pieces: Frame) -> None:
        if pieces:
            self._socket.sendall(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def receive(self, limit: int = MAX_FRAME) -> tuple[str, Any] | None:
        """The next message; None after the peer has closed the connection."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        size, length = _HEAD.unpack(head)
        if size > limit or length > size:
            raise WireError(f"a frame of {size:,} bytes (limit {limit:,}) with {length:,} bytes of text")
        body = self._read(size)
        if body is None:
            return None
        if self._keys is not None:
            code = self._read(_MAC)
            expected = self._code(self._keys[1], self._received, [head, body])
            if code is None or not hmac.compare_digest(code, expected):
                raise WireError("a frame without the code of the job's secret")
            self._received += 1
        message = unpack(body[:length], body[length:])
        if not isinstance(message, list) or len(message) != 2 or not isinstance(message[0], str):
            raise WireError("a frame is no message")
        return message[0], message[1]

    @staticmethod
    def _code(key: bytes, number: int, pieces: list[Any]) -> bytes:
        code = hmac.new(key, struct.pack(">Q", number), hashlib.sha256)
        for piece in pieces:
            code.update(piece)
        return code.digest()

    def _read(self, count: int) -> memoryview | None:
        data = memoryview(bytearray(count))
        done = 0
        while done < count:
            try:
                got = self._socket.recv_into(data[done:])
            except (ConnectionError, BrokenPipeError):
                return None
            if got == 0:
                return None
            done += got
        return data

    def close(self) -> None:
        """End the connection; a thread that receives returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
