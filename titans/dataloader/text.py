"""Training text that every machine already has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Other people's packages; tests, which would be most of the text; a hundred nearly equal tables.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"})

# A module with fewer functions than one in so many bytes is a table (of characters, of error numbers, ...).
BYTES_PER_FUNCTION = 4000


class TextSplit(NamedTuple):
    """Two texts that share no file."""

    train: bytes
    validation: bytes


def stdlib_text(
    max_bytes: int = 6_000_000, validation_share: float = 0.05, root: str | Path | None = None
) -> TextSplit:
    """About ``max_bytes`` of the ``.py`` files under ``root`` (default: the running Python's standard
    library).

    The files come in an order that is mixed but the same on every rank and in every run.  The first ones, as
    far as ``validation_share`` of the bytes needs them, are held out for validation.
    """
    if max_bytes < 1 or not 0 < validation_share < 1:
        raise ValueError(
            f"stdlib_text needs max_bytes > 0 and 0 < validation_share < 1, "
            f"got max_bytes={max_bytes} and validation_share={validation_share}"
        )
    folder = Path(sysconfig.get_path("stdlib") if root is None else root)
    programs = _read(folder, max_bytes)
    wanted = int(sum(map(len, programs)) * validation_share)
    validation = train = b""
    for first, program in enumerate(programs):
        if len(validation) >= wanted:
            train = b"".join(programs[first:])
            break
        validation += program[: wanted - len(validation)]
    if not train or not validation:
        raise FileNotFoundError(
            f"there are not enough Python sources under {folder} for training and validation; "
            "pass root=, a folder with .py files"
        )
    return TextSplit(train, validation)


def _read(folder: Path, max_bytes: int) -> list[bytes]:
    programs: list[bytes] = []
    left = max_bytes
    for path in _mixed(folder):
        content = path.read_bytes()
        if content.count(b"def ") * BYTES_PER_FUNCTION >= len(content):
            programs.append(content[:left])
            left -= len(programs[-1])
        if left <= 0:
            break
    return programs


def _mixed(folder: Path) -> list[Path]:
    """The sources in the order of a hash of their names: neighbours in the alphabet are alike, these are
    not.
    """
    names = (path.relative_to(folder) for path in folder.rglob("*.py"))
    kept = (name for name in names if SKIPPED.isdisjoint(name.parts))
    ordered = sorted(kept, key=lambda name: (zlib.crc32(name.as_posix().encode()), name.as_posix()))
    return [folder / name for name in ordered]


class TokenWindows(Dataset[Tensor]):
    """Token ids cut into windows of ``length``, one after the other; a rest that fills no window is left
    out.
    """

    def __init__(self, tokens: Tensor | list[int], length: int) -> None:
        self.tokens = torch.as_tensor(tokens, dtype=torch.int64)
        if length < 2 or self.tokens.dim() != 1 or len(self.tokens) < length:
            raise ValueError(
                f"TokenWindows needs at least one window of at least 2 tokens, got length={length} and "
                f"tokens of shape {tuple(self.tokens.shape)}"
            )
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.tokens[index * self.length : (index + 1) * self.length]
