"""Rows of tokens from files, and from nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titans.dataloader.tokenizer import Tokenizer
from titans.dataloader.webtext import SyntheticText, WebtextDataset


def decoded(data: WebtextDataset) -> bytes:
    return bytes(int(i) for n in range(len(data)) for i in data[n][1])


def test_lines_lists_and_plain_text_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    (tmp_path / "b.json").write_text(json.dumps([{"text": "three"}]))
    (tmp_path / "c.txt").write_text("four!")
    (tmp_path / "d.bin").write_bytes(b"\1" * 99)
    data = WebtextDataset(tmp_path, 4)
    assert decoded(data) == b"one\0two\0three\0four!\0"[: 4 * len(data)]
    assert (len(data), data.vocab_size) == (5, 256)
    inputs, labels = data[1]
    assert torch.equal(inputs["input_ids"], labels)
    assert labels.dtype == torch.int64
    with pytest.raises(IndexError, match="row 5 of 5"):
        data[5]


def test_a_single_file_and_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abababab" * 4)
    tokenizer = Tokenizer.train(b"abababab" * 4, 257)
    data = WebtextDataset(tmp_path / "text", 2, tokenizer)
    assert data.vocab_size == 257
    assert len(data) < len(WebtextDataset(tmp_path / "text", 2))


def test_bad_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="it is neither a file nor a folder"):
        WebtextDataset(tmp_path / "nowhere", 4)
    with pytest.raises(FileNotFoundError, match=r"has no file that ends in \.json, \.jsonl, \.txt"):
        WebtextDataset(tmp_path, 4)
    path = tmp_path / "a.json"
    for content, message in (
        ('{"text": 3}', r'line 1 is not an object with a "text"'),
        ('[{"words": "x"}]', r'item 0 is not an object with a "text"'),
        ('{"text": "x"}\n{', "line 2 is not JSON"),
        ('{"text": "x"}', "has 2 tokens, fewer than one row of seq_len=4"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            WebtextDataset(path, 4)
    with pytest.raises(ValueError, match="rows of at least 2 tokens, got seq_len=1"):
        WebtextDataset(path, 1)


def test_synthetic_rows_repeat() -> None:
    data = SyntheticText(3, 8, 50)
    assert len(data) == 3
    assert torch.equal(data[2][1], SyntheticText(3, 8, 50)[2][1])
    assert not torch.equal(data[1][1], data[2][1])
    assert int(data[0][1].max()) < 50
    with pytest.raises(IndexError, match="row 3 of 3"):
        data[3]
    with pytest.raises(ValueError, match="count > 0, seq_len > 1 and vocab_size > 0"):
        SyntheticText(0, 8, 50)
