"""Checksums of single files, and boxes that must be a tensor."""

from __future__ import annotations

import json
import random
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.checkpoint_io.boxes import Box, check_cover
from colossalai.checkpoint_io.files.state_file import (
    damaged_records,
    flatten,
    load_shard_state_dict,
    read_checksums,
    save_state_dict,
    tensor_crc,
)
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredBox, StoredTensor, read_manifest


def _flip(path: Path, values: torch.Tensor) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(values.numpy().tobytes()) + 2] ^= 4
    path.write_bytes(raw)


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"a": torch.randn(5), "empty": torch.empty(0), "nested": {"b": torch.randn(7, 3)}, "n": 3}


def test_a_flipped_bit_in_a_torch_file_is_found_with_its_tensor(tmp_path: Path) -> None:
    state = _state()
    save_state_dict(state, tmp_path / "x.bin")
    _flip(tmp_path / "x.bin", state["nested"]["b"])
    torch.load(tmp_path / "x.bin", weights_only=True)  # torch itself does not notice
    assert list(damaged_records(tmp_path / "x.bin")) == ["nested.b"]
    with pytest.raises(RuntimeError, match=r"x\.bin is not .* the checksum of nested\.b does not agree"):
        load_shard_state_dict(tmp_path / "x.bin")


def test_a_flipped_bit_in_safetensors_is_found_with_its_tensor(tmp_path: Path) -> None:
    state = {"a": torch.randn(5), "b": torch.randn(7, 3)}
    save_state_dict(state, tmp_path / "x", use_safetensors=True)
    _flip(tmp_path / "x", state["b"])
    with pytest.raises(RuntimeError, match=r"/x is not .* the checksum of b is \d+, and \d+ was written"):
        load_shard_state_dict(tmp_path / "x")


def test_damaged_sums(tmp_path: Path) -> None:
    assert read_checksums(None) is None
    assert read_checksums({"format": "pt"}) is None
    for text in ("{", "[]", "[" * 100_000):
        with pytest.raises(RuntimeError, match="the checksums in its metadata are damaged"):
            read_checksums({"colossalai.crc32": text})


def test_a_record_that_is_no_tensor(tmp_path: Path) -> None:
    save_state_dict(_state(), tmp_path / "x.bin")
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        pickled = archive.read(name)
    raw = bytearray(path.read_bytes())
    raw[raw.index(pickled) + 5] ^= 1
    path.write_bytes(raw)
    assert list(damaged_records(path)) == [name]


def test_the_sum_knows_dtype_and_shape() -> None:
    x = torch.arange(6, dtype=torch.int32)
    others = [x.view(2, 3), x.view(torch.float32), x.roll(1)]
    assert all(tensor_crc(other) != tensor_crc(x) for other in others)
    assert tensor_crc(x.clone()) == tensor_crc(x)


def test_flatten() -> None:
    assert dict(flatten({"a": [1, {"b": 2}], "c": {}})) == {"a.0": 1, "a.1.b": 2, "c": {}}


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (4, 3))], "its boxes hold 12 elements, and its shape (4, 4) has 16"),
        ([Box((0, 1), (4, 4))], "is outside the shape (4, 4)"),
        ([Box((0,), (16,))], "is no box of a tensor of shape (4, 4)"),
        ([Box((0, 0), (-4, -4))], "is no box of a tensor of shape (4, 4)"),
        ([Box((0, 0), (4, 2)), Box((0, 0), (4, 2))], "have elements in common"),
        ([Box((0, 0), (4, 2)), Box((0, 1), (4, 2))], "have elements in common"),
        ([Box((0, 0), (2, 4)), Box((1, 0), (2, 4))], "have elements in common"),
    ],
)
def test_boxes_that_are_not_the_tensor(boxes: list[Box], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cover((4, 4), boxes)


def test_boxes_that_are_the_tensor() -> None:
    check_cover((), [Box((), ())])
    check_cover((0, 3), [Box((0, 0), (0, 3))])
    draw = random.Random(0)
    for _ in range(50):  # random cuts of a random shape
        shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(4):
            box = boxes.pop(draw.randrange(len(boxes)))
            dim = draw.randrange(len(shape))
            at = draw.randrange(box.sizes[dim] + 1)
            for start, length in ((0, at), (at, box.sizes[dim] - at)):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += start
                sizes[dim] = length
                boxes.append(Box(tuple(offsets), tuple(sizes)))
        check_cover(shape, boxes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("number", "2", "number is '2' and no int"),
        ("values", [], "values is [] and no dict"),
        ("ties", None, "ties is None and no dict"),
        ("files", ["../x"], "'../x' is not the name of a file beside it"),
        ("tensors", {"w": 3}, "w is 3: "),
        ("tensors", {"w": {"shape": ["2"], "dtype": "F32", "boxes": []}}, "must be whole numbers"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    box = Box((0,), (2,))
    Manifest({"w": StoredTensor("w", (2,), torch.float32, [StoredBox(box, "f.safetensors", 1)])}).write(
        tmp_path
    )
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    assert read_manifest(tmp_path).tensors["w"].shape == (2,)
    del content["crc32"]
    content[key] = value
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(json.dumps({**content, "crc32": zlib.crc32(text.encode())}))
    with pytest.raises(
        RuntimeError, match=rf"manifest\.json is not a complete manifest: .*{re.escape(message)}"
    ):
        read_manifest(tmp_path)
