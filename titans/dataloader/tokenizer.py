"""A small byte-pair tokenizer: bytes, and the most frequent neighbours merged into longer tokens.

The vocabulary starts with the 256 bytes, so every text can be written.  Training repeats one step: count all
neighbouring pairs of tokens, make the most frequent pair a new token.  A text is first cut into pieces (a
word with the space before it, a number, punctuation, a line break with the indentation after it) and no token
crosses a piece; therefore training needs only the distinct pieces with their counts, and encoding needs each
distinct piece only once.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

PIECE = re.compile(rb"\n[ ]*|[ ]?[A-Za-z_]+|[ ]?[0-9]+|[ ]?[^\sA-Za-z0-9_]+|\s")

Pair = tuple[int, int]


class Tokenizer:
    """Text to token ids and back, by the merges that ``Tokenizer.train`` learnt.

    ``merges[i]`` is the pair of tokens that token ``256 + i`` stands for.
    """

    def __init__(self, merges: Sequence[Pair] = ()) -> None:
        self.merges = [(int(a), int(b)) for a, b in merges]
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._bytes = [bytes([i]) for i in range(256)]
        for rank, (a, b) in enumerate(self.merges):
            if not (0 <= a < 256 + rank and 0 <= b < 256 + rank):
                raise ValueError(f"merge {rank} joins tokens {a} and {b}, which do not exist before it")
            self._bytes.append(self._bytes[a] + self._bytes[b])
        self._encode_piece = lru_cache(maxsize=None)(self._merge_piece)

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        for piece in PIECE.findall(data):
            ids.extend(self._encode_piece(piece))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bytes that are no valid UTF-8 (a sample may end inside a letter) show as
        U+FFFD.
        """
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def _merge_piece(self, piece: bytes) -> tuple[int, ...]:
        ids = list(piece)
        while len(ids) > 1:
            pair = min(pairwise(ids), key=lambda p: self._ranks.get(p, len(self.merges)))
            if pair not in self._ranks:
                break
            ids = _merge(ids, pair, 256 + self._ranks[pair])
        return tuple(ids)

    @classmethod
    def train(cls, data: bytes, vocab_size: int) -> Tokenizer:
        """Learn ``vocab_size - 256`` merges from ``data``; fewer when no pair occurs twice any more."""
        if vocab_size < 256:
            raise ValueError(f"a vocabulary holds at least the 256 bytes, got vocab_size={vocab_size}")
        corpus = _Corpus(data)
        merges: list[Pair] = []
        while len(merges) < vocab_size - 256:
            pair = corpus.most_frequent()
            if pair is None:
                break
            corpus.merge(pair, new=256 + len(merges))
            merges.append(pair)
        return cls(merges)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"merges": self.merges}))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        return cls(json.loads(Path(path).read_text())["merges"])


class _Corpus:
    """The distinct pieces of a text as tokens, and how often each pair of neighbours occurs in the text.

    A merge looks only at the pieces that hold its pair, which is what makes training fast.
    """

    def __init__(self, data: bytes) -> None:
        repeats = Counter(PIECE.findall(data))
        self._pieces = [list(piece) for piece in repeats]
        self._repeats = list(repeats.values())
        self._counts: Counter[Pair] = Counter()
        self._homes: defaultdict[Pair, set[int]] = defaultdict(set)  # pair -> pieces that hold or held it
        for index in range(len(self._pieces)):
            self._count(index)

    def most_frequent(self) -> Pair | None:
        """The pair with the highest count of at least 2; of equals, the one of the larger tokens."""
        highest = max(self._counts.values(), default=0)
        return max(pair for pair, n in self._counts.items() if n == highest) if highest > 1 else None

    def merge(self, pair: Pair, new: int) -> None:
        for index in self._homes.pop(pair):
            self._count(index, sign=-1)
            self._pieces[index] = _merge(self._pieces[index], pair, new)
            self._count(index)

    def _count(self, index: int, sign: int = 1) -> None:
        for pair in pairwise(self._pieces[index]):
            self._counts[pair] += sign * self._repeats[index]
            if sign > 0:
                self._homes[pair].add(index)
            elif self._counts[pair] == 0:
                del self._counts[pair]


def _merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            merged.append(new)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged
