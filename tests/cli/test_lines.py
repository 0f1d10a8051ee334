"""Lines out of chunks, and progress bars on a shared terminal."""

from __future__ import annotations

import pytest

from colossalai.cli.node_agent import LONGEST_LINE, PROGRESS_INTERVAL, LineAssembler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def feed(assembler: LineAssembler, *chunks: bytes) -> list[bytes]:
    return [line for chunk in chunks for line in assembler.feed(chunk)]


def test_lines_are_whole() -> None:
    assembler = LineAssembler()
    assert feed(assembler, b"a", b"b\nc", b"d\r\n", b"\n") == [b"ab", b"cd", b""]
    assert feed(assembler, b"no end") == []
    assert list(assembler.finish()) == [b"no end"]
    assert list(assembler.finish()) == []


@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_progress_is_shown_now_and_then(style: bytes) -> None:
    clock = Clock()
    assembler = LineAssembler(clock)
    assert feed(assembler, style % 10) == [b"10%"]
    clock.now = PROGRESS_INTERVAL / 2
    assert feed(assembler, style % 20, style % 30) == []
    clock.now = PROGRESS_INTERVAL
    assert feed(assembler, style % 40) == [b"40%"]
    assert feed(assembler, style % 100, b"\n") == [b"100%"]


def test_rewritten_line_in_pieces() -> None:
    clock = Clock()
    assembler = LineAssembler(clock)
    feed(assembler, b"\r10%")
    assert feed(assembler, b" of it\n") == [b"10% of it"]


def test_endless_line_does_not_fill_the_memory() -> None:
    assert feed(LineAssembler(), b"x" * (LONGEST_LINE + 1)) == [b"x" * (LONGEST_LINE + 1)]
