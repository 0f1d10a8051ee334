"""Text from tokens as they come: pieces that no later token changes, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character
_PENDING, _LAST = 16, 8
"""Tokens without text that are kept at most, and of these the last, which may begin a character."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt, with those that the tokenizer puts around a text."""
    if tokenizer is None:
        raise ValueError(
            f"the prompt {text[:40]!r} is a text, but this Generator has no tokenizer; give it one"
            " (Generator(model, tokenizer)), or tokens as prompts"
        )
    return [int(token) for token in tokenizer.encode(text)]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of ``tokens`` without special ones."""
    try:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    except TypeError:  # a tokenizer that knows no special tokens
        text = tokenizer.decode(list(tokens))
    return str(text)


class TextStream:
    """The text of one request.

    Args:
        prompt: the last tokens before it, since a token may begin with a space or not depending on them.
        stop: strings that end it, and are left out.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = list(prompt[-6:])
        self._begin, self._read = 0, len(self._tokens)
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The new text after ``tokens``; ``last`` gives what was held back, since no more will come."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens += tokens
        before = decode(self._tokenizer, self._tokens[self._begin : self._read])
        now = decode(self._tokenizer, self._tokens[self._begin :])
        if last or (len(now) > len(before) and not now.endswith(_UNFINISHED)):
            self._held += now[len(before) :]
            self._begin, self._read = self._read, len(self._tokens)
        elif len(self._tokens) - self._read > _PENDING:
            self._settle(before, now)
        places = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if places:
            self.stopped = True
            return self._held[: min(places)]
        keep = 0 if last else self._may_begin()
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def _settle(self, before: str, now: str) -> None:
        """Give what tokens further back have written: special ones nothing, bytes that are no text signs of
        that.  Else each of many such tokens would be decoded with all before it.
        """
        cut = len(self._tokens) - _LAST
        text = decode(self._tokenizer, self._tokens[self._begin : cut])
        # no character lies across the cut: its end would have changed the text, and it is not still to come
        if now.startswith(text) and (len(now) > len(text) or not text.endswith(_UNFINISHED)):
            self._held += text[len(before) :]
            self._begin, self._read = self._read, cut

    def _may_begin(self) -> int:
        """How many of the last characters may begin a stop string."""
        return max(
            (n for text in self._stop for n in range(1, len(text)) if self._held.endswith(text[:n])),
            default=0,
        )
