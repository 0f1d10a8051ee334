"""Suggests the known word that a user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Up to this length a word differs from many honest names by one letter (`mode` from `model`, `bf16` from
# `fp16`).
SHORT = 6
CLOSE = 0.85


def suggestion(word: object, known: Iterable[str]) -> str:
    """``"did you mean 'x'? "`` when something known is near, and then all that is known."""
    words = sorted(known)
    meant = near(str(word).lower(), words)
    return (f"did you mean {meant!r}? " if meant else "") + f"known: {', '.join(map(repr, words))}"


def near(word: str, words: Sequence[str]) -> str | None:
    """The one of ``words`` that is most like ``word``, if any is like it at all."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.5)), None)


def misspelt(word: str, reserved: Sequence[str]) -> str | None:
    """The reserved word of which ``word`` is a misspelling, or None where ``word`` is a name of its own.

    Case, underscores and doubled letters never make a different word.  A long word is also recognised by
    likeness, a short one only by the same letters in another order.  A word that extends a reserved one
    (``model_name``, ``zero_stage``) is a name of its own.
    """
    if word in reserved:
        return None
    plain = _plain(word)
    for candidate in reserved:
        if plain == _plain(candidate):
            return candidate
    lower = word.lower()
    for candidate in reserved:
        if lower.startswith(f"{candidate}_") or lower.endswith(f"_{candidate}"):
            return None
    for candidate in reserved:
        other = _plain(candidate)
        if len(other) <= SHORT:
            alike = sorted(plain) == sorted(other)
        else:
            alike = difflib.SequenceMatcher(None, plain, other).ratio() >= CLOSE
        if alike:
            return candidate
    return None


def _plain(word: str) -> str:
    letters = word.lower().replace("_", "").replace("-", "")
    return "".join(c for i, c in enumerate(letters) if i == 0 or letters[i - 1] != c)
