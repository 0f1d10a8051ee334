"""Frames: values come back as they were sent, and nothing else is let in."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest
import torch

from colossalai.serving.wire import Channel, WireError, pack, pack_frame, unpack


def _pair() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)


def test_values_come_back_as_they_were() -> None:
    value = {
        "none": None,
        "numbers": [1, -2.5, True],
        2: ("a", b"\0\xff"),
        "tensors": [
            torch.arange(6).reshape(2, 3).T,
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.empty(0, 3),
        ],
        "bools": torch.tensor([True, False]),
    }
    text, *rest = pack(value)
    got = unpack(text, memoryview(b"".join(rest)))
    assert str(got) == str(value)
    assert got["tensors"][1].dtype is torch.bfloat16
    assert got["tensors"][2].shape == (0, 3)


def test_other_objects_are_refused_with_their_type() -> None:
    with pytest.raises(TypeError, match=r"cannot hold .*Channel"):
        pack({"x": _pair()[0]})


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b'{"x":["float32",[1000000]]}',
        b'{"x":["object",[1]]}',
        b'{"x":["float32",[-1]]}',
        b'{"b":-1}',
        b'{"__reduce__":1}',
        b"[" * 100_000,
        b'{"d":1}',
    ],
)
def test_frames_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack(data, memoryview(b""))


def test_a_frame_over_the_limit_is_refused_before_memory_is_taken() -> None:
    own, other = socket.socketpair()
    other.sendall(struct.pack(">QI", 1 << 60, 10))
    with pytest.raises(WireError, match="limit"):
        Channel(own).receive()


def _meet(secrets: tuple[bytes, bytes]) -> tuple[Channel, Channel, list[Any]]:
    first, second = _pair()
    failed: list[Any] = []

    def accept() -> None:
        try:
            second.authenticate(secrets[1], accepts=True, timeout=5)
        except WireError as error:
            failed.append(error)
            second.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        first.authenticate(secrets[0], accepts=False, timeout=5)
    except WireError as error:
        failed.append(error)
        first.close()
    thread.join()
    return first, second, failed


def _meeting() -> tuple[Channel, Channel]:
    first, second, _ = _meet((b"a" * 16, b"a" * 16))
    return first, second


@pytest.mark.parametrize("make", [_pair, _meeting])
def test_frames_that_are_sent_together_arrive_one_by_one(make: Any) -> None:
    """Small ones, one larger than what is joined, and none at all."""
    first, second = make()
    values = [*range(300), torch.arange(40_000), "x" * (1 << 17), [1, None, [2.5, {"a": (3,)}]]]

    def send() -> None:
        first.send_frame()
        first.send_frame(*(pack_frame("value", value) for value in values))
        first.close()

    thread = threading.Thread(target=send)
    thread.start()
    got = []
    while (message := second.receive()) is not None:
        got.append(message)
    thread.join()
    assert [kind for kind, _ in got] == ["value"] * len(values)
    assert str([value for _, value in got]) == str(values)


def test_both_ends_prove_that_they_know_the_secret() -> None:
    first, second, failed = _meet((b"a" * 16, b"a" * 16))
    assert not failed
    first.send("x", torch.ones(3))
    message = second.receive()
    assert message is not None
    assert message[1].sum() == 3
    assert _meet((b"a" * 16, b"b" * 16))[2]


def test_a_frame_that_is_repeated_or_changed_on_the_way_is_refused() -> None:
    first, second, _ = _meet((b"a" * 16, b"a" * 16))
    tap, end = socket.socketpair()
    real, first._socket = first._socket, end
    first.send("x", 1)
    frame = tap.recv(1 << 16)
    real.sendall(frame)
    assert second.receive() == ("x", 1)
    real.sendall(frame)
    with pytest.raises(WireError, match="code"):
        second.receive()
