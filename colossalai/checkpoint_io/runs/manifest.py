"""The manifest of a checkpoint: its tensors with shape, dtype and stored boxes, and all other values.

A folder is a checkpoint if it holds ``manifest.json``.  A save writes data files under new names, and the
manifest last, in one step; so whenever a machine stops, the folder has the new checkpoint or the one from
before, and a folder without a manifest has none.  (Renaming a folder would not do: it cannot take the place
of one that is not empty.)  What no manifest names is removed by the next save.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from colossalai._version import __version__
from colossalai.checkpoint_io.boxes import Box, Shape, check_cover
from colossalai.checkpoint_io.byte_io import dtype_of, name_of
from colossalai.checkpoint_io.files.sharding import RUN
from colossalai.checkpoint_io.files.state_file import write_file
from colossalai.logging import get_dist_logger

MANIFEST = RUN
FORMAT = "colossalai-checkpoint"
VERSION = 1
_DATA_FILE = re.compile(r"[0-9a-f]{8}-\d{5}-\d{5}\.safetensors")


def data_file(save: str, rank: int, index: int) -> str:
    """The name of a data file; ``save`` is a word of eight hex digits that is unique in the folder."""
    return f"{save}-{rank:05d}-{index:05d}.safetensors"


def save_of(file: str) -> str:
    """The word of the save that wrote a data file."""
    return file.partition("-")[0]


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor, in ``file``, with the CRC-32 of its bytes."""

    box: Box
    file: str
    crc: int


@dataclass
class StoredTensor:
    """A tensor of the serial model as it is stored."""

    name: str
    shape: Shape
    dtype: torch.dtype
    boxes: list[StoredBox]

    def key(self, box: Box) -> str:
        """The name of ``box`` in its file: that of the tensor, with its place if it is a part."""
        return block_key(self.name, self.shape, box)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def block_key(name: str, shape: Shape, box: Box) -> str:
    return name if box.sizes == shape else f"{name}@{','.join(map(str, box.offsets))}"


@dataclass
class Manifest:
    """What ``manifest.json`` says.

    ``number`` counts the checkpoints of the folder around this one: the latest has the highest.  ``plan``
    says how the job that wrote it was laid out, for people.  ``ties`` are further names of stored tensors.
    """

    tensors: dict[str, StoredTensor]
    values: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    number: int = 1
    library: str = __version__
    torch: str = str(torch.__version__)

    @property
    def files(self) -> list[str]:
        """The data files, each once."""
        return list(dict.fromkeys(stored.file for t in self.tensors.values() for stored in t.boxes))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def find(self, name: str) -> StoredTensor | None:
        """The tensor ``name``, or the one that it is tied to."""
        found = self.tensors.get(name)
        return self.tensors.get(self.ties.get(name, "")) if found is None else found

    def below(self, prefix: str) -> Iterator[StoredTensor]:
        """The tensors whose names begin with ``prefix``."""
        return (tensor for name, tensor in self.tensors.items() if name.startswith(prefix))

    def write(self, folder: Path) -> None:
        """Publish the checkpoint: from now on the folder holds this one."""
        text = _with_sum(self._content())
        write_file(folder / MANIFEST, lambda draft: draft.write_text(text, encoding="ascii"))

    def _content(self) -> dict[str, Any]:
        files = self.files
        numbers = {file: i for i, file in enumerate(files)}
        tensors = {
            t.name: {
                "shape": list(t.shape),
                "dtype": name_of(t.dtype),
                "boxes": [[list(s.box.offsets), list(s.box.sizes), numbers[s.file], s.crc] for s in t.boxes],
            }
            for t in self.tensors.values()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "number": self.number,
            "library": self.library,
            "torch": self.torch,
            "plan": self.plan,
            "files": files,
            "ties": self.ties,
            "values": self.values,
            "tensors": tensors,
        }


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest in ``folder``; what is missing, damaged, foreign or of a newer version is an error."""
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder} is not a checkpoint: it has no {MANIFEST} (a save that was interrupted leaves none)"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise RuntimeError(f"{path} is damaged or cut short: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RuntimeError(f"{path} is not the manifest of a colossalai checkpoint")
    if content.get("version") != VERSION:
        raise RuntimeError(
            f"{path} has version {content.get('version')!r} of the format, and this colossalai"
            f" ({__version__}) reads version"
            f" {VERSION}; it was written by colossalai {content.get('library')}"
        )
    written = content.pop("crc32", None)
    if written != _sum(content):
        raise RuntimeError(f"{path} is damaged: its checksum is {_sum(content)}, and {written} was written")
    return _parse(content, path)


# What a manifest holds, and of what type each is.
_TYPES = {
    "tensors": dict,
    "values": dict,
    "ties": dict,
    "plan": dict,
    "number": int,
    "library": str,
    "torch": str,
}


def _parse(content: dict[str, Any], path: Path) -> Manifest:
    try:
        for key, kind in _TYPES.items():
            if type(content[key]) is not kind:
                raise TypeError(f"{key} is {_shortened(content[key])} and no {kind.__name__}")
        files = content["files"]
        for file in files:
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
        tensors = {name: _parse_tensor(name, saved, files) for name, saved in content["tensors"].items()}
        return Manifest(tensors, **{key: content[key] for key in _TYPES if key != "tensors"})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RuntimeError(f"{path} is not a complete manifest: {error!r}") from error


def _parse_tensor(name: str, saved: dict[str, Any], files: list[str]) -> StoredTensor:
    try:
        shape = tuple(saved["shape"])
        boxes = [
            StoredBox(Box(tuple(offsets), tuple(sizes)), files[number], crc)
            for offsets, sizes, number, crc in saved["boxes"]
        ]
        if any(type(n) is not int for n in (*shape, *(stored.crc for stored in boxes))):
            raise TypeError("its shape and its checksums must be whole numbers")
        check_cover(shape, [stored.box for stored in boxes])
        return StoredTensor(name, shape, dtype_of(saved["dtype"]), boxes)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{name} is {_shortened(saved)}: {error}") from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _text(content: dict[str, Any]) -> str:
    # dicts keep their order, as they do in a file that is read
    return json.dumps(content, separators=(",", ":"))


def _sum(content: dict[str, Any]) -> int:
    return zlib.crc32(_text(content).encode())


def _with_sum(content: dict[str, Any]) -> str:
    return _text({**content, "crc32": _sum(content)}) + "\n"


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def checkpoints(root: str | Path) -> list[Path]:
    """The complete checkpoints among the folders in ``root``, oldest first.

    One whose manifest is damaged is passed over.
    """
    return _checkpoints(root)[0]


def _checkpoints(root: str | Path) -> tuple[list[Path], list[str]]:
    """The complete checkpoints in ``root``, oldest first, and what is wrong with others."""
    found, faults = [], []
    for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else []:
        if folder.is_dir() and is_checkpoint(folder):
            try:
                found.append((read_manifest(folder).number, folder))
            except RuntimeError as error:
                faults.append(str(error))
    return [folder for _, folder in sorted(found)], faults


def latest(root: str | Path) -> Path | None:
    """Find the checkpoint that was saved last in ``root``, or ``root`` itself; None if there is none.

    One whose manifest is damaged is passed over with a warning: otherwise a run would begin anew, or further
    back, without a word.
    """
    if is_checkpoint(Path(root)):
        return Path(root)
    found, faults = _checkpoints(root)
    for fault in faults:
        get_dist_logger().warning_once(f"a checkpoint in {root} is passed over: {fault}", ranks=[0])
    return found[-1] if found else None


def left_behind(folder: Path, keep: set[str]) -> list[Path]:
    """List data files and drafts in ``folder`` that are not in ``keep``: replaced, or interrupted."""
    drafts = folder.glob(f".{MANIFEST}.*.tmp")
    data = (p for p in folder.glob("*.safetensors") if _DATA_FILE.fullmatch(p.name) and p.name not in keep)
    return [*drafts, *data]
