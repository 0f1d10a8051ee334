"""Ways in which a checkpoint is damaged, or made to do harm.

Each takes a folder and random numbers, and tells what it touched.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], list[str]]

MANIFEST = "manifest.json"
JUNK: list[Any] = [
    None,
    [],
    {},
    "x",
    "",
    -1,
    0,
    7,
    2**70,
    1.5,
    True,
    [[]],
    {"$tensor": 1},
    [None, "y"],
    "../../etc/passwd",
]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def data_files(folder: Path) -> list[Path]:
    return [path for path in files_of(folder) if path.suffix != ".json"]


def _change(folder: Path, draw: random.Random, change: Callable[[bytearray], None]) -> list[str]:
    path = draw.choice([path for path in files_of(folder) if path.stat().st_size])
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)
    return [path.name]


def flip(folder: Path, draw: random.Random) -> list[str]:
    def change(raw: bytearray) -> None:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)

    return _change(folder, draw, change)


def flip_in_header(folder: Path, draw: random.Random) -> list[str]:
    """The first bytes say what the others are."""

    def change(raw: bytearray) -> None:
        raw[draw.randrange(min(len(raw), 300))] ^= 1 << draw.randrange(8)

    return _change(folder, draw, change)


def flip_many(folder: Path, draw: random.Random) -> list[str]:
    def change(raw: bytearray) -> None:
        for _ in range(8):
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)

    return _change(folder, draw, change)


def overwrite(folder: Path, draw: random.Random) -> list[str]:
    def change(raw: bytearray) -> None:
        start = draw.randrange(len(raw))
        end = min(len(raw), start + 64)
        raw[start:end] = draw.randbytes(end - start)

    return _change(folder, draw, change)


def lose_a_page(folder: Path, draw: random.Random) -> list[str]:
    def change(raw: bytearray) -> None:
        start = draw.randrange(len(raw)) // 512 * 512
        end = min(len(raw), start + 512)
        raw[start:end] = bytes(end - start)

    return _change(folder, draw, change)


def truncate(folder: Path, draw: random.Random) -> list[str]:
    def change(raw: bytearray) -> None:
        del raw[draw.randrange(len(raw)) :]

    return _change(folder, draw, change)


def append(folder: Path, draw: random.Random) -> list[str]:
    return _change(folder, draw, lambda raw: raw.extend(draw.randbytes(draw.randrange(1, 500))))


def delete(folder: Path, draw: random.Random) -> list[str]:
    path = draw.choice(files_of(folder))
    path.unlink()
    return [path.name]


def swap(folder: Path, draw: random.Random) -> list[str]:
    if len(data_files(folder)) < 2:
        return truncate(folder, draw)
    a, b = draw.sample(data_files(folder), 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return [a.name, b.name]


def copy_over(folder: Path, draw: random.Random) -> list[str]:
    """One file in the place of another."""
    if len(data_files(folder)) < 2:
        return truncate(folder, draw)
    a, b = draw.sample(data_files(folder), 2)
    b.write_bytes(a.read_bytes())
    return [b.name]


# JSON


def _json_files(folder: Path) -> list[Path]:
    return [path for path in files_of(folder) if path.suffix == ".json"]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in nested lists and objects, as (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_nodes(value[key])]]


def _edit(container: Any, key: Any, draw: random.Random) -> None:
    if draw.random() < 0.3:
        del container[key]
    else:
        container[key] = draw.choice(JUNK)


def edit_json(folder: Path, draw: random.Random) -> list[str]:
    """Anything in a manifest or index becomes something else; the checksum of a manifest stays."""
    if not _json_files(folder):
        return flip_in_header(folder, draw)
    path = draw.choice(_json_files(folder))
    content = json.loads(path.read_text())
    _edit(*draw.choice(_nodes(content)), draw)
    path.write_text(json.dumps(content))
    return [path.name]


def forge(folder: Path, draw: random.Random) -> list[str]:
    """What a manifest says about files and tensors becomes something else, and its checksum agrees."""
    path = folder / MANIFEST
    if not path.is_file():
        return edit_json(folder, draw)
    content = json.loads(path.read_text())
    del content["crc32"]
    if draw.random() < 0.2:
        _edit(content, draw.choice(sorted(set(content) - {"values", "plan", "library", "torch"})), draw)
    else:
        part = draw.choice(["files", "tensors", "tensors", "tensors"])
        _edit(*draw.choice(_nodes(content[part])), draw)
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(json.dumps({**content, "crc32": zlib.crc32(text.encode())}))
    return [path.name]


def exchange_boxes(folder: Path, draw: random.Random) -> list[str]:
    """Two tensors of a forged manifest point to each other's place."""
    path = folder / MANIFEST
    if not path.is_file():
        return swap(folder, draw)
    content = json.loads(path.read_text())
    del content["crc32"]
    a, b = draw.sample(sorted(content["tensors"]), 2)
    tensors = content["tensors"]
    if draw.random() < 0.5:
        tensors[a]["boxes"], tensors[b]["boxes"] = tensors[b]["boxes"], tensors[a]["boxes"]
    else:
        tensors[a]["boxes"] += tensors[a]["boxes"][:1]
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(json.dumps({**content, "crc32": zlib.crc32(text.encode())}))
    return [path.name]


# what would run code


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def mark_of(folder: Path) -> Path:
    return folder.parent / "executed"


def hostile(folder: Path, draw: random.Random) -> list[str]:
    """A pickle with a bomb in the place of a data file: bare, or in an archive of ``torch.save``."""
    path = draw.choice(data_files(folder))
    bomb = pickle.dumps({"weight": Bomb(str(mark_of(folder)))}, protocol=2)
    if draw.random() < 0.4:
        path.write_bytes(bomb)
        return [path.name]
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    path.write_bytes(raw.getvalue())
    return [path.name]


def hostile_inside(folder: Path, draw: random.Random) -> list[str]:
    """The pickle in an archive, with sound checksums, does harm before it gives what it should."""
    archives = [path for path in data_files(folder) if zipfile.is_zipfile(path)]
    if not archives:
        return hostile(folder, draw)
    path = draw.choice(archives)
    bomb = pickle.dumps(Bomb(str(mark_of(folder))), protocol=2)[2:-1]  # without protocol and end
    raw = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(raw, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith("data.pkl"):
                content = content[:2] + bomb + b"0" + content[2:]
            new.writestr(info.filename, content)
    path.write_bytes(raw.getvalue())
    return [path.name]


KINDS: dict[str, Damage] = {
    function.__name__: function
    for function in (
        flip,
        flip_in_header,
        flip_many,
        overwrite,
        lose_a_page,
        truncate,
        append,
        delete,
        swap,
        copy_over,
        edit_json,
        forge,
        exchange_boxes,
        hostile,
        hostile_inside,
    )
}
