"""Bytes between tensors and files in strips, by several threads: exact at every border."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from colossalai.checkpoint_io import byte_io
from colossalai.checkpoint_io.boxes import Box, whole
from colossalai.checkpoint_io.held_tensors import HeldBox
from colossalai.checkpoint_io.runs.data_file import StoredFile, TensorToWrite, write_tensors
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredBox, StoredTensor, block_key
from colossalai.checkpoint_io.runs.reading import RunReader, Want


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of a few bytes, so that small tensors have many."""
    for name, size in (("STRIP", 48), ("AHEAD", 160)):
        monkeypatch.setattr(byte_io, name, size)
    monkeypatch.setattr(byte_io, "_rooms", type(byte_io._rooms)())


@pytest.mark.parametrize("count", [0, 1, 11, 12, 13, 100])
def test_strips_are_the_tensor(count: int) -> None:
    for tensor in (torch.arange(count, dtype=torch.float32), torch.arange(2 * count)[::2].bfloat16()):
        found = b"".join(bytes(strip) for strip in byte_io.strips_of(tensor))
        in_order = tensor.clone(memory_format=torch.contiguous_format)
        assert found == in_order.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("count", [0, 1, 12, 13, 100])
def test_a_file_is_read_into_a_tensor(count: int, tmp_path: Path) -> None:
    tensor = torch.randn(count)
    path = tmp_path / "x"
    path.write_bytes(b"before" + tensor.numpy().tobytes())
    with path.open("rb") as file:
        room = torch.zeros(count)
        byte_io.read_into(file.fileno(), 6, room)
        assert torch.equal(room, tensor)
        parts = [bytes(strip) for strip in byte_io.file_strips(file.fileno(), 6, 4 * count)]
        assert b"".join(parts) == tensor.numpy().tobytes()
        with pytest.raises(
            OSError, match=rf"the file ends at byte {6 + 4 * count}, and 4 more were expected"
        ):
            byte_io.read_into(file.fileno(), 6, torch.zeros(count + 1))


def test_a_file_that_becomes_shorter_is_an_error_that_names_it(tmp_path: Path) -> None:
    tensor = torch.randn(100)
    path = tmp_path / "x.safetensors"
    sums = write_tensors(path, [TensorToWrite("w", tensor.dtype, (100,), lambda: tensor)])
    file = StoredFile(path)
    file.check("w", tensor.dtype, (100,), sums["w"])
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(
        RuntimeError, match=r"x\.safetensors cannot be read where w is: the file ends at byte"
    ):
        file.check("w", tensor.dtype, (100,), sums["w"])
    with pytest.raises(RuntimeError, match=r"x\.safetensors cannot be read where w is"):
        file.read("w", tensor.dtype, (100,), 0, torch.zeros(100))


@pytest.mark.parametrize(
    ("box", "start"),
    [
        (Box((0, 0, 0), (4, 5, 6)), 0),
        (Box((1, 0, 0), (2, 5, 6)), 30),
        (Box((1, 2, 0), (1, 2, 6)), 42),
        (Box((1, 2, 3), (1, 1, 2)), 45),
        (Box((1, 2, 3), (1, 2, 2)), None),
        (Box((0, 0, 0), (4, 5, 1)), None),
        (Box((0, 1, 0), (2, 1, 6)), None),
    ],
)
def test_runs_within_a_box(box: Box, start: int | None) -> None:
    assert box.run_within(whole((4, 5, 6))) == start
    flat = torch.arange(120).view(4, 5, 6)[box.within(whole((4, 5, 6)))].reshape(-1)
    in_order = torch.equal(flat, flat[0] + torch.arange(len(flat)))
    assert in_order == (start is not None)
    assert start is None or flat[0] == start


def test_pieces_of_every_form_are_filled(tmp_path: Path) -> None:
    """Runs, columns, other dtypes, transposed memory; and of two that go to one place, the last counts."""
    tensor = torch.randn(12, 7)
    halves = {Box((0, 0), (5, 7)): tensor[:5], Box((5, 0), (7, 7)): tensor[5:]}
    names = {box: block_key("w", (12, 7), box) for box in halves}
    blocks = [
        TensorToWrite(names[box], part.dtype, box.sizes, partial(Tensor.clone, part))
        for box, part in halves.items()
    ]
    sums = write_tensors(tmp_path / "x.safetensors", blocks)
    stored = [StoredBox(box, "x.safetensors", sums[names[box]]) for box in halves]
    source = StoredTensor("w", (12, 7), tensor.dtype, stored)
    reader = RunReader(tmp_path, Manifest({"w": source}))
    rooms: dict[Box, Tensor] = {
        Box((3, 0), (6, 7)): torch.zeros(6, 7),
        Box((2, 3), (9, 2)): torch.zeros(9, 2),
        Box((0, 0), (12, 7)): torch.zeros(7, 12).t(),
        Box((1, 0), (11, 7)): torch.zeros(11, 7, dtype=torch.float64),
        Box((4, 1), (1, 5)): torch.zeros(3, 5)[1:2],
    }
    wants = [Want(source, [HeldBox(box, room)]) for box, room in rooms.items()]
    twice = torch.zeros(1, 7)
    wants += [Want(source, [HeldBox(Box((row, 0), (1, 7)), twice)]) for row in (3, 9, 4)]
    reader.check_wants(wants)
    reader.fill(wants)
    for box, room in rooms.items():
        assert torch.equal(room.float(), tensor[box.within(whole((12, 7)))])
    assert torch.equal(twice, tensor[4:5])
