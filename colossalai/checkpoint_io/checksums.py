"""Checksums of single files: what finds a flipped bit in the weights, which the formats themselves would let pass."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.strips import STRIP, strips_of

CHECKSUMS = "colossalai.crc32"  # the key in the metadata of a safetensors file
_ZIP = b"PK\x03\x04"


def tensor_crc(tensor: Tensor) -> int:
    """The CRC-32 of a tensor: its dtype and shape, then its bytes."""
    crc = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for strip in strips_of(tensor):
        crc = zlib.crc32(strip, crc)
    return crc


def sums_as_text(sums: Mapping[str, int]) -> str:
    """The sums of all tensors of a file, for its metadata."""
    return json.dumps(sums, separators=(",", ":"))


def read_checksums(metadata: Mapping[str, str] | None) -> dict[str, int] | None:
    """The sums in the metadata of a safetensors file; None if whoever wrote it wrote none."""
    text = (metadata or {}).get(CHECKSUMS)
    if text is None:
        return None
    try:
        sums = json.loads(text)
    except (ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        raise RuntimeError("the checksums in its metadata are damaged")
    return sums


def check_tensor(name: str, tensor: Tensor, sums: Mapping[str, int] | None) -> None:
    """Compare a tensor with its sum, if there are sums."""
    if sums is not None and sums.get(name) != tensor_crc(tensor):
        raise RuntimeError(
            f"the checksum of {name} is {tensor_crc(tensor)}, and {sums.get(name)} was written"
        )


def is_archive(path: Path) -> bool:
    """Whether torch takes the file for its zip format (the one of before torch 1.6 has no checksums)."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def check_archive(path: Path) -> None:
    """Compare the sums in a file of ``torch.save``; the error names the first tensor that is damaged."""
    for name in damaged_records(path):
        raise RuntimeError(f"the checksum of {name} does not agree with what was written")


def damaged_records(path: Path) -> Iterator[str]:
    """What is damaged in a file of ``torch.save``: names of tensors, or of other records of the archive."""
    if not is_archive(path):
        return
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        for info in infos:
            try:
                with archive.open(info) as record:
                    while record.read(STRIP):
                        pass
            except zipfile.BadZipFile:
                yield _tensor_in(path, info, infos)


def _tensor_in(path: Path, info: zipfile.ZipInfo, infos: list[zipfile.ZipInfo]) -> str:
    """The name of the tensor that a record holds: mapped into memory, tensors lie in the order of their records."""
    records = sorted((i.header_offset, i.filename) for i in infos if "/data/" in i.filename and i.file_size)
    names = [name for _, name in records]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # the record that says what the others are is damaged too
        return info.filename
    by_place: dict[int, str] = {}
    for name, value in flatten(state):
        if isinstance(value, Tensor) and value.numel():
            by_place.setdefault(value.untyped_storage().data_ptr(), name)
    found = [by_place[place] for place in sorted(by_place)]
    if info.filename not in names or len(found) != len(names):
        return info.filename
    return found[names.index(info.filename)]


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, with their paths."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if not items:
        yield name, value
    for key, inner in items:
        yield from flatten(inner, f"{name}.{key}" if name else str(key))
