"""Tokenizer, text and windows."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from titans.dataloader.text import TokenWindows, stdlib_text
from titans.dataloader.tokenizer import PIECE, Tokenizer

TEXT = b"def spam(eggs):\n    return eggs\n\ndef eggs(spam):\n    return spam\n" * 3


def test_merges_are_the_most_frequent_pairs() -> None:
    tokenizer = Tokenizer.train(b"abab abab cb", 258)
    # "ab" occurs 4 times in the pieces "abab" and " abab"; then "abab" twice (" " + "ab" only once)
    assert tokenizer.merges == [(97, 98), (256, 256)]
    assert tokenizer.encode("abab") == [257]
    assert tokenizer.encode("aba") == [256, 97]


def test_every_text_survives() -> None:
    tokenizer = Tokenizer.train(TEXT, 300)
    for text in (TEXT.decode(), "", "\t\r\n  x=1\n\n\n   \u00e4\u4e2d", "no such words: 0123 __init__"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(bytes(range(256))))


def test_training_shortens_and_is_repeatable() -> None:
    first, second = Tokenizer.train(TEXT, 300), Tokenizer.train(TEXT, 300)
    assert first.merges == second.merges
    assert len(first.encode(TEXT)) < len(TEXT) / 3
    assert Tokenizer().encode(TEXT) == list(TEXT)


def test_training_ends_when_nothing_repeats() -> None:
    assert Tokenizer.train(b"abc", 1000).vocab_size == 256


def test_fast_counts_equal_counting_anew() -> None:
    """The pair counts are kept up to date piece by piece; count everything again after each merge instead."""
    data = Path(__file__).read_bytes()
    tokenizer = Tokenizer.train(data, 320)
    for rank, pair in enumerate(tokenizer.merges):
        before = Tokenizer(tokenizer.merges[:rank])
        counts: dict[tuple[int, int], int] = {}
        for piece in PIECE.findall(data):
            tokens = before.encode(piece)
            for neighbours in pairwise(tokens):
                counts[neighbours] = counts.get(neighbours, 0) + 1
        assert pair == max(counts, key=lambda p: (counts[p], p))


def test_a_cut_letter_is_replaced() -> None:
    assert Tokenizer().decode([0xC3]) == "\ufffd"


def test_tokenizer_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(TEXT, 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode(TEXT) == tokenizer.encode(TEXT)


def test_wrong_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least the 256 bytes, got vocab_size=255"):
        Tokenizer.train(TEXT, 255)
    with pytest.raises(ValueError, match=r"merge 1 joins tokens 97 and 257, which do not exist"):
        Tokenizer([(97, 98), (97, 257)])


def test_stdlib_text_is_bounded_and_repeatable() -> None:
    split = stdlib_text(200_000, 0.1)
    assert split == stdlib_text(200_000, 0.1)
    assert 120_000 < len(split.train) <= 180_000, "what is left of the last file held out is not used"
    assert len(split.validation) == 20_000
    assert len(stdlib_text(100_000, 0.1).validation) == 10_000
    assert b"def " in split.train
    assert b"import " in split.validation


def test_no_file_is_in_both_parts(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"m{i}.py").write_text(f"def f{i:02}(): pass\n" * 10)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("def zz(): pass\n")
    (tmp_path / "table.py").write_text("zz = 1\n")
    split = stdlib_text(10_000, 0.05, root=tmp_path)
    seen = [set(re.findall(rb"def f(\d\d)", text)) for text in split]
    assert seen[0].isdisjoint(seen[1])
    assert seen[0] | seen[1] == {f"{i:02}".encode() for i in range(20)}
    assert b"zz" not in split.train + split.validation


def test_text_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"not enough Python sources under {tmp_path}.*pass root="):
        stdlib_text(root=tmp_path)
    with pytest.raises(ValueError, match=r"max_bytes=0"):
        stdlib_text(0)
    with pytest.raises(ValueError, match=r"validation_share=1"):
        stdlib_text(validation_share=1)


def test_windows_cover_the_tokens_once() -> None:
    windows = TokenWindows(list(range(11)), 3)
    assert len(windows) == 3
    assert torch.cat(list(windows)).tolist() == list(range(9))
    with pytest.raises(IndexError, match="window 3 of 3"):
        windows[3]


@pytest.mark.parametrize(("tokens", "length"), [([1, 2], 3), ([1, 2], 1), ([], 2)])
def test_windows_that_do_not_exist_are_refused(tokens: list[int], length: int) -> None:
    with pytest.raises(ValueError, match=rf"at least one window .* length={length}"):
        TokenWindows(tokens, length)
