"""Read a checkpoint: each rank copies what stored boxes and its own boxes have in common.

First everything is compared and summed, on all ranks; the first byte of a model changes only when all of them
are content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colossalai.checkpoint_io.boxes import Box
from colossalai.checkpoint_io.byte_io import THREADS, wait_for_devices
from colossalai.checkpoint_io.held_tensors import HeldBox, is_expanded, whole_piece
from colossalai.checkpoint_io.runs.data_file import StoredFile
from colossalai.checkpoint_io.runs.manifest import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredTensor,
    left_behind,
    save_of,
)


class Want(NamedTuple):
    """Pieces that are to be filled from a stored tensor."""

    source: StoredTensor
    pieces: list[HeldBox]


class RunReader:
    """The files of one checkpoint, opened when they are needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, StoredFile] = {}

    def check_wants(self, wants: Iterable[Want]) -> None:
        """Whether all that is wanted is there, as far as manifest and headers tell."""
        for want in wants:
            for piece in want.pieces:
                if is_expanded(piece.view()):
                    raise RuntimeError(
                        f"{want.source.name} cannot be loaded: in the model, several of its elements are one"
                        " in memory (it was made"
                        " by expand); give the model a copy, with .clone()"
                    )
                found = 0
                for stored in want.source.boxes:
                    if (common := stored.box.common(piece.box)) is not None:
                        found += common.numel
                        self._tensor(want.source, stored)
                if found != piece.box.numel:
                    raise RuntimeError(
                        f"{self.folder} has {found} of the {piece.box.numel} elements of {want.source.name}"
                        " that are needed"
                        f" ({piece.box})"
                    )

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Sum what is stored; of several ranks, each takes its part of the tensors."""
        for path, key in self.unnamed() if part == 0 else ():
            what = f"holds {key}, which" if key else "was written by this save, and"
            raise RuntimeError(
                f"{path} {what} {MANIFEST} does not name: it was edited, or is of another save"
            )
        checks = [(tensor, stored) for tensor in self.manifest.tensors.values() for stored in tensor.boxes]
        mine = sorted(checks, key=lambda c: -c[1].box.numel * c[0].dtype.itemsize)[part::parts]
        for file in {stored.file for _, stored in mine}:
            self._file(file)

        def check(item: tuple[StoredTensor, StoredBox]) -> None:
            tensor, stored = item
            self._file(stored.file).check(tensor.key(stored.box), tensor.dtype, stored.box.sizes, stored.crc)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(check, mine))

    def unnamed(self) -> Iterator[tuple[Path, str]]:
        """List what this save wrote and the manifest does not name: tensors, and (without a key) whole files.

        Other saves, which were interrupted, may have left files in the folder; their names begin with other
        words.
        """
        named: dict[str, set[str]] = {}
        for tensor in self.manifest.tensors.values():
            for stored in tensor.boxes:
                named.setdefault(stored.file, set()).add(tensor.key(stored.box))
        for file, keys in named.items():
            yield from ((self.folder / file, key) for key in self._file(file).keys() if key not in keys)  # noqa: SIM118
        words = {save_of(file) for file in named}
        left = left_behind(self.folder, set(named))
        yield from ((path, "") for path in left if save_of(path.name) in words)

    def fill(self, wants: Sequence[Want]) -> None:
        """Copy stored values to where they are wanted, on several threads; in order if to the same place."""
        copies: dict[Any, list[Callable[[], None]]] = {}
        for want in wants:
            for piece in want.pieces:
                for stored in want.source.boxes:
                    if (common := stored.box.common(piece.box)) is not None:
                        target = piece.view()[common.within(piece.box)]
                        copy = partial(self._copy, want.source, stored, common, target)
                        copies.setdefault((target.device, target.data_ptr()), []).append(copy)
                        self._file(stored.file)
        wait_for_devices()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_run, copies.values()))

    @torch.no_grad()
    def _copy(self, source: StoredTensor, stored: StoredBox, common: Box, target: torch.Tensor) -> None:
        first = common.run_within(stored.box)
        if first is not None and target.dtype == source.dtype and target.is_contiguous():
            file = self._file(stored.file)
            file.read(source.key(stored.box), source.dtype, stored.box.sizes, first, target)
        else:
            target.copy_(self._tensor(source, stored)[common.within(stored.box)])

    def whole(self, source: StoredTensor) -> torch.Tensor:
        """All of a stored tensor, in the memory of its file if it lies in one piece."""
        if len(source.boxes) == 1 and source.boxes[0].box.sizes == source.shape:
            return self._tensor(source, source.boxes[0])
        room = torch.empty(source.shape, dtype=source.dtype)
        self.fill([Want(source, whole_piece(room))])
        return room

    def _tensor(self, source: StoredTensor, stored: StoredBox) -> torch.Tensor:
        return self._file(stored.file).tensor(source.key(stored.box), source.dtype, stored.box.sizes)

    def _file(self, name: str) -> StoredFile:
        if name not in self._files:
            self._files[name] = StoredFile(self.folder / name)
        return self._files[name]


def _run(copies: Sequence[Callable[[], None]]) -> None:
    for copy in copies:
        copy()
