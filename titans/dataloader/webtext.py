"""Text for a language model, from files: rows of ``seq_len`` token ids that are the labels as well.

The files are read once and kept as tokens, one text after the other with an end mark between them; a row may
begin in the middle of a text.  Without a tokenizer a token is a byte, which needs no vocabulary from
elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from titans.dataloader.tokenizer import Tokenizer

JSON = (".json", ".jsonl")
TEXT = (".txt", ".md", ".py", ".rst")

# Between two texts: a byte that texts do not have.
END = b"\0"

Row = tuple[dict[str, Tensor], Tensor]


class WebtextDataset(Dataset[Row]):
    """``({"input_ids": ids}, ids)``, with ids of shape (seq_len,).

    Args:
        path: a file, or a folder that is searched for files: JSON lines, or a list, of objects with a
            ``text`` (``.json``, ``.jsonl``); plain text (``.txt``, ``.md``, ``.py``, ``.rst``; a single file
            may have any other name).
        seq_len: tokens in a row; a rest that fills no row is left out.
        tokenizer: what makes tokens of a text; bytes, 256 of them, if left out.
    """

    def __init__(self, path: str | Path, seq_len: int, tokenizer: Tokenizer | None = None) -> None:
        if seq_len < 2:
            raise ValueError(f"WebtextDataset needs rows of at least 2 tokens, got seq_len={seq_len}")
        self.seq_len = seq_len
        self.vocab_size = 256 if tokenizer is None else tokenizer.vocab_size
        texts = [text.encode() + END for file in _files(Path(path)) for text in _texts(file)]
        if tokenizer is None:
            self.tokens = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).copy())
        else:
            self.tokens = torch.tensor(
                [i for text in texts for i in tokenizer.encode(text)], dtype=torch.int32
            )
        if len(self) == 0:
            raise ValueError(
                f"the text in {path} has {len(self.tokens)} tokens, fewer than one row of seq_len={seq_len}"
            )

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        ids = self.tokens[index * self.seq_len : (index + 1) * self.seq_len].long()
        return {"input_ids": ids}, ids


class SyntheticText(Dataset[Row]):
    """``count`` rows of random token ids, in the form of ``WebtextDataset``; the same on every rank."""

    def __init__(self, count: int, seq_len: int, vocab_size: int, seed: int = 0) -> None:
        if count < 1 or seq_len < 2 or vocab_size < 1:
            raise ValueError(
                "SyntheticText needs count > 0, seq_len > 1 and vocab_size > 0, got"
                f" {count}, {seq_len} and {vocab_size}"
            )
        self.count, self.seq_len, self.vocab_size, self.seed = count, seq_len, vocab_size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(f"row {index} of {self.count}")
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        ids = torch.randint(self.vocab_size, (self.seq_len,), generator=generator)
        return {"input_ids": ids}, ids


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no text at {path}: it is neither a file nor a folder")
    found = sorted(file for file in path.rglob("*") if file.suffix in (*JSON, *TEXT) and file.is_file())
    if not found:
        raise FileNotFoundError(f"the folder {path} has no file that ends in {', '.join((*JSON, *TEXT))}")
    return found


def _texts(file: Path) -> Iterator[str]:
    content = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix not in JSON:
        yield content
    elif content.lstrip().startswith("["):
        for number, item in enumerate(_parse(content, file, "")):
            yield _text_of(item, f"{file}, item {number}")
    else:
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield _text_of(_parse(line, file, f", line {number}"), f"{file}, line {number}")


def _parse(text: str, file: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}{where} is not JSON: {error}") from error


def _text_of(item: Any, where: str) -> str:
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{where} is not an object with a "text": {str(item)[:80]!r}')
    return text
