"""Write a checkpoint: every rank its own files, then the manifest, which makes them a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai._numeric import round_up
from colossalai.checkpoint_io.boxes import Box
from colossalai.checkpoint_io.byte_io import THREADS, wait_for_devices
from colossalai.checkpoint_io.files.sharding import MB, plan_shards
from colossalai.checkpoint_io.files.state_file import sync
from colossalai.checkpoint_io.held_tensors import HeldTensor
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.runs.data_file import TensorToWrite, write_tensors
from colossalai.checkpoint_io.runs.manifest import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredTensor,
    block_key,
    checkpoints,
    data_file,
    is_checkpoint,
    left_behind,
    read_manifest,
)
from colossalai.checkpoint_io.write_plan import TensorOutline, WritePlan, make_write_plan, outline
from colossalai.logging import get_dist_logger
from colossalai.utils.memory.host_memory import host_empty
from colossalai.utils.text import size_text

SLACK = 1 << 20  # bytes beside the tensors: headers, the manifest

# Where a box of a tensor was written: its file and checksum.
Record = dict[tuple[str, Box], tuple[str, int]]


@dataclass
class Contents:
    """What one rank has to save.

    ``values`` are rank 0's; ``merged`` is what every rank tells about its part of them.
    """

    entries: list[HeldTensor]
    values: dict[str, Any] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass
class Draft:
    """A save between its plan and its end."""

    folder: Path
    word: str
    number: int
    ranks: JobRanks
    plan: WritePlan
    files: dict[str, list[TensorToWrite]]
    keys: dict[str, tuple[str, Box]]  # what the blocks are, by their keys
    contents: Contents
    keep: int | None
    lock: Lock


Merge = Callable[[dict[str, Any], Sequence[dict[str, Any]]], dict[str, Any]]


class Save:
    """A save that was begun.

    ``wait`` returns when it is complete, or raises on all ranks what went wrong on one.
    """

    def __init__(self, path: Path, thread: threading.Thread | None = None) -> None:
        self.path = path
        self._thread = thread
        self._failure: BaseException | None = None

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()


# Of all writers, since saves in the background speak over one group.
_last_in_background: list[Save | None] = [None]


def _end_of_others() -> None:
    """Wait until no save is under way in the background; its own writer raises its error."""
    if (last := _last_in_background[0]) is not None and (thread := last._thread) is not None:
        thread.join()


class Writer:
    """The saves of one job, one after the other.

    It keeps the host memory that saves in the background copy into.
    """

    def __init__(self) -> None:
        self._pending: Save | None = None
        self._buffer: Tensor | None = None

    def wait(self) -> None:
        """Wait for the save that is under way; its error, if it had one, is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def save(
        self,
        collect: Callable[[], Contents],
        merge: Merge,
        path: str | Path,
        *,
        keep: int | None = None,
        size_per_shard: float = 1024,
        background: bool = False,
    ) -> Save:
        """Save what ``collect`` finds on each rank; every rank calls this."""
        _check_options(keep, size_per_shard)
        self.wait()
        lock = Lock()
        try:
            draft = _plan(collect, merge, Path(path), keep, size_per_shard, lock)
            if background:
                self._snapshot(draft)
        except BaseException:
            lock.release()
            raise
        if not background:
            wait_for_devices()  # files are written by other threads
            _write(draft)
            return Save(draft.folder)
        _end_of_others()
        draft.ranks = JobRanks(background=True)
        save = Save(draft.folder)

        def run() -> None:
            try:
                _write(draft)
            except BaseException as error:
                save._failure = error
                get_dist_logger().error(f"the save in the background to {draft.folder} failed: {error}")

        save._thread = threading.Thread(target=run, name="colossalai-save")
        save._thread.start()
        self._pending = _last_in_background[0] = save
        return save

    def _snapshot(self, draft: Draft) -> None:
        """Copy what is to be written to the host, from where it is written while training goes on."""
        failure = None
        try:
            blocks = [block for file in draft.files.values() for block in file]
            places, needed = _places(blocks)
            if self._buffer is None or self._buffer.numel() < needed:
                self._buffer = None  # first give back the old one
                self._buffer = _host_memory(max(needed, 1))
            copies = {
                block.key: _copied(block, self._buffer[places[block.key] :][: block.nbytes])
                for block in blocks
            }
            wait_for_devices()
            draft.files = {name: [copies[b.key] for b in file] for name, file in draft.files.items()}
            draft.contents.entries = []  # training may go on and change them
        except Exception as error:
            failure = error
        draft.ranks.agree(failure)


def _check_options(keep: int | None, size_per_shard: float) -> None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep is how many checkpoints stay, at least 1, or None for all; got {keep!r}")
    if isinstance(size_per_shard, str) or not size_per_shard > 0:
        raise ValueError(f"size_per_shard is a number of MB above 0, got {size_per_shard!r}")


def _plan(
    collect: Callable[[], Contents],
    merge: Merge,
    folder: Path,
    keep: int | None,
    size_per_shard: float,
    lock: Lock,
) -> Draft:
    """Agree with all ranks who writes what; nothing is written before all checks have passed."""
    ranks = JobRanks()
    contents, failure = Contents([]), None
    try:
        contents = collect()
    except Exception as error:
        failure = error
    told: list[tuple[list[TensorOutline], dict[str, Any]]] = ranks.agree(
        failure, (outline(contents.entries), contents.merged)
    )
    plan = make_write_plan([described for described, _ in told])
    contents.values = merge(contents.values, [merged for _, merged in told])
    start: tuple[str, int] | None = None
    if ranks.rank == 0:
        try:
            start = _prepare(folder, plan, lock)
        except Exception as error:
            failure = error
    word, number = ranks.agree(failure, start)[0]
    files, keys = _own_files(contents.entries, plan, ranks.rank, word, size_per_shard)
    return Draft(folder, word, number, ranks, plan, files, keys, contents, keep, lock)


def _prepare(folder: Path, plan: WritePlan, lock: Lock) -> tuple[str, int]:
    """The folder, locked and with room for the checkpoint; returns a word for its files, and its number."""
    if folder.is_file():
        raise ValueError(f"a checkpoint is a folder, but {folder} is a file")
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    needed, free = plan.nbytes + SLACK, shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"no room for the checkpoint: it needs {size_text(needed)}, and {existing} has {size_text(free)}"
            " free; nothing was"
            " written",
        )
    folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    keep = set(read_manifest(folder).files) if _is_readable(folder) else None
    if keep is not None or not is_checkpoint(folder):  # of a damaged one, everything stays for a closer look
        for path in left_behind(folder, keep or set()):
            path.unlink(missing_ok=True)
    others = [p for p in folder.absolute().parent.iterdir() if p.is_dir() and is_checkpoint(p)]
    return uuid.uuid4().hex[:8], 1 + max(map(_number, others), default=0)


def _is_readable(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (RuntimeError, FileNotFoundError):
        return False
    return True


def _number(folder: Path) -> int:
    return _read_number(folder, (folder / MANIFEST).stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _read_number(folder: Path, changed: int) -> int:
    return read_manifest(folder).number if _is_readable(folder) else 0


def _own_files(
    entries: Iterable[HeldTensor], plan: WritePlan, rank: int, word: str, size_per_shard: float
) -> tuple[dict[str, list[TensorToWrite]], dict[str, tuple[str, Box]]]:
    """The blocks that this rank writes, by file, and what they are."""
    blocks: dict[str, TensorToWrite] = {}
    keys: dict[str, tuple[str, Box]] = {}
    for entry in entries:
        name = entry.name if entry.name in plan.tensors else plan.ties[entry.name]
        for piece, box in product(entry.pieces, plan.tensors[name].written_by(rank)):
            key = block_key(name, entry.shape, box)
            if key not in blocks and piece.box.holds(box):
                blocks[key] = TensorToWrite(key, entry.dtype, box.sizes, partial(piece.read_part, box))
                keys[key] = (name, box)
    units = [([key], block.nbytes / MB) for key, block in blocks.items()]
    shards = [names for names, _ in plan_shards(units, size_per_shard)]
    return {data_file(word, rank, i): [blocks[key] for key in shard] for i, shard in enumerate(shards)}, keys


def _places(blocks: Sequence[TensorToWrite]) -> tuple[dict[str, int], int]:
    """Where the copies of ``blocks`` lie in one buffer, and its size."""
    places, end = {}, 0
    for block in blocks:
        places[block.key] = end
        end += round_up(block.nbytes, 64)
    return places, end


def _host_memory(nbytes: int) -> Tensor:
    """Room for copies.

    To be pinned, memory must be touched first; without a GPU, the copy itself is the first to touch it.
    """
    if torch.cuda.is_available():
        return host_empty(nbytes, torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8)


def _copied(block: TensorToWrite, room: Tensor) -> TensorToWrite:
    copy = room.view(block.dtype).view(block.shape)
    copy.copy_(block.read(), non_blocking=True)
    return TensorToWrite(block.key, block.dtype, block.shape, lambda: copy)


def _write(draft: Draft) -> None:
    try:
        _write_and_publish(draft)
    finally:
        draft.lock.release()


def _write_and_publish(draft: Draft) -> None:
    failure, record = None, Record()
    try:
        record = _write_files(draft)
        sync(draft.folder)
    except Exception as error:
        failure = error
    try:
        records = draft.ranks.agree(failure, record)
    except BaseException:
        for name in draft.files:
            (draft.folder / name).unlink(missing_ok=True)
        raise
    failure = None
    if draft.ranks.rank == 0:
        try:
            _publish(draft, records)
        except Exception as error:
            failure = error
        draft.lock.release()  # when other ranks return, nothing is left of it
    draft.ranks.agree(failure)


def _write_files(draft: Draft) -> Record:
    names = list(draft.files)
    write = partial(_write_file, draft)
    if len(names) <= 1:
        sums = [write(name) for name in names]
    else:
        with ThreadPoolExecutor(min(THREADS, len(names))) as pool:
            sums = list(pool.map(write, names))
    return {
        draft.keys[key]: (name, crc)
        for name, found in zip(names, sums, strict=True)
        for key, crc in found.items()
    }


def _write_file(draft: Draft, name: str) -> dict[str, int]:
    try:
        return write_tensors(draft.folder / name, draft.files[name])
    except OSError as error:
        raise OSError(error.errno, f"{draft.folder / name} cannot be written: {error.strerror}") from error


def _publish(draft: Draft, records: Sequence[Record]) -> None:
    """Let rank 0 replace the manifest by the new one, and then remove the files that are no longer used."""
    stored: Record = {}
    for record in records:
        stored.update(record)
    tensors = {
        name: StoredTensor(
            name,
            logical.shape,
            logical.dtype,
            [StoredBox(box, *stored[name, box]) for box in logical.writers],
        )
        for name, logical in draft.plan.tensors.items()
    }
    contents = draft.contents
    manifest = Manifest(tensors, contents.values, draft.plan.ties, contents.plan, draft.number)
    manifest.write(draft.folder)
    for path in left_behind(draft.folder, set(manifest.files)):
        path.unlink(missing_ok=True)
    if draft.keep is not None:
        for folder in checkpoints(draft.folder.absolute().parent)[: -draft.keep]:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint, but no files of others in its folder: the manifest first, then the data files."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)
    for path in (*left_behind(folder, set()), folder / LOCK):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


LOCK = ".lock"


class Lock:
    """The lock of one folder, taken once and released once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Take the lock of ``folder``; if another process has it, that is an error."""
        path = folder / LOCK
        while self._descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                self._take_over(path)
                continue
            except OSError:  # a file system without locks
                os.close(descriptor)
                return
            if _is_at(descriptor, path):
                self._path, self._descriptor = path, descriptor
            else:  # its owner has finished and removed it in between
                os.close(descriptor)
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    @staticmethod
    def _take_over(path: Path) -> None:
        """Remove a lock whose owner is gone."""
        owner = _owner(path)
        if owner.get("host") == socket.gethostname() and not _is_alive(owner.get("pid")):
            path.unlink(missing_ok=True)
            return
        raise RuntimeError(
            f"{path.parent} is being saved to by another job (process {owner.get('pid', 'unknown')} on"
            f" {owner.get('host', 'an unknown host')}); give each job a folder of its own, or wait for it"
        )

    def release(self) -> None:
        if self._descriptor is not None and self._path is not None:
            if _is_at(self._descriptor, self._path):
                self._path.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also of children that have it from a fork
            os.close(self._descriptor)
            self._descriptor = None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
