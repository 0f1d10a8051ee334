"""One process at one moment: the stack of every thread, the collective it waits in, the collectives it
issued.

A call that waits inside C++ (gloo, a store) releases the GIL, so another thread of the process can look at
its Python stack.  The collective is the outermost public function of ``torch.distributed`` at the inner end
of that stack.  Where the stack does not show it (``work.wait()``, DDP, NCCL), torch's flight recorder does:
it keeps the last collectives of every group with the line that issued each.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_TORCH = os.path.dirname(torch.__file__) + os.sep
_COLOSSALAI = str(Path(__file__).parents[2]) + os.sep
_FUNCTIONAL = os.path.join(_TORCH, "distributed", "_functional_collectives.py")
_PEER = {"send": ("dst", "to"), "isend": ("dst", "to"), "recv": ("src", "from"), "irecv": ("src", "from")}


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def of_torch(self) -> bool:
        return self.file.startswith(_TORCH)

    @property
    def of_library(self) -> bool:
        return self.of_torch or self.file.startswith(_COLOSSALAI)


@dataclass(frozen=True)
class Wait:
    """A collective that a thread has entered and not left."""

    kind: str
    group: str
    caller: Frame  # the innermost frame outside torch
    user: Frame  # the innermost frame outside torch and colossalai


@dataclass(frozen=True)
class Issued:
    """The last collective that this process issued on a group, and how many it has issued there."""

    kind: str
    group: str
    group_name: str  # equal on all members
    ranks: tuple[int, ...]
    count: int
    caller: Frame


@dataclass(frozen=True)
class RankSnapshot:
    threads: tuple[tuple[str, tuple[Frame, ...]], ...]  # the main thread first; frames outermost first
    wait: Wait | None
    issued: tuple[Issued, ...]  # the most recent last
    left: bool = False  # set by a harness whose function has returned on this rank

    def leave(self) -> RankSnapshot:
        return replace(self, left=True)


def take_snapshot(root: str | None = None) -> RankSnapshot:
    """Look at every thread of this process but the calling one.

    With ``root``, a file, the frames up to the last one of that file are left out: they belong to a harness.
    """
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()
    del running[threading.get_ident()]
    order = sorted(running, key=lambda ident: ident != main)
    waits = (_find_wait(running[ident]) for ident in order)
    return RankSnapshot(
        threads=tuple((names.get(i) or f"thread {i}", _frames(running[i], root)) for i in order),
        wait=next((wait for wait in waits if wait is not None), None),
        issued=_issued(),
    )


def progress() -> object:
    """A value that stays equal only while the main thread stands still and no collective is issued."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = tuple((f.f_code.co_filename, f.f_lasti) for f in _outwards(frame))
    return stack, _flight_record(collectives=False)["pg_status"]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def _frames(frame: FrameType, root: str | None) -> tuple[Frame, ...]:
    frames = [_frame(f) for f in _outwards(frame)]
    inner = next((i for i, f in enumerate(frames) if f.file == root), len(frames))
    return tuple(reversed(frames[:inner] or frames))


def _find_wait(frame: FrameType) -> Wait | None:
    found = None
    stack = list(_outwards(frame))
    for inner in stack:
        if not _frame(inner).of_torch:
            break
        if _is_collective(_frame(inner)):
            found = inner
    if found is None:
        return None
    caller, user = _callers(_frame(f) for f in stack)
    return Wait(_kind(found), _group_of(found), caller, user)


def _is_collective(frame: Frame) -> bool:
    if frame.file == _FUNCTIONAL:
        return not frame.name.startswith("_")
    return frame.file == c10d.__file__ and frame.name in c10d.__all__


def _callers(inwards: Iterable[Frame]) -> tuple[Frame, Frame]:
    frames = list(inwards)
    caller = next((f for f in frames if not f.of_torch), frames[-1])
    return caller, next((f for f in frames if not f.of_library), caller)


def _kind(frame: FrameType) -> str:
    name = frame.f_code.co_name
    if name in _PEER:
        argument, word = _PEER[name]
        peer = frame.f_locals.get(argument)
        return name if peer is None else f"{name} {word} rank {peer}"
    return name


def _group_of(frame: FrameType) -> str:
    group = frame.f_locals.get("group")
    group = dist.group.WORLD if group is None else group
    return "no process group yet" if group is None else _describe_group(group)[0]


def _describe_group(group: Any) -> tuple[str, tuple[int, ...]]:
    """``axis tp: ranks 0, 2`` and the ranks; torch names a group of a device mesh after its axis."""
    try:
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
        ranks = tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return (
            f"group {group}",
            (),
        )  # destroyed since, or one of the other forms that functional collectives take
    if group.group_desc.startswith("mesh_"):
        return f"axis {group.group_desc.removeprefix('mesh_')}: ranks {show_ranks(ranks)}", ranks
    whole = len(ranks) == dist.get_world_size()
    return (f"all {len(ranks)} ranks" if whole else f"ranks {show_ranks(ranks)}"), ranks


def show_ranks(ranks: Sequence[int]) -> str:
    """``0-3, 8``: ascending ranks, three or more in a row joined; the middle of a long list is left out."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [p for run in runs for p in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    return ", ".join(parts if len(parts) <= 16 else [*parts[:8], "...", parts[-1]])


def _issued() -> tuple[Issued, ...]:
    last: dict[str, Issued] = {}
    entries = _flight_record(collectives=True)["entries"]
    for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
        if entry["is_p2p"] or not entry["frames"]:
            continue
        caller, _ = _callers(Frame(f["filename"], f["line"], f["name"]) for f in entry["frames"])
        backend, _, kind = entry["profiling_name"].rpartition(":")
        group, ranks = _describe_group(entry["process_group"][0])
        name = f"{entry['process_group'][0]} of {backend}"  # each backend of a group counts for itself
        last.pop(name, None)  # so that the group used most recently comes last
        last[name] = Issued(kind, group, name, ranks, entry["collective_seq_id"], caller)
    return tuple(last.values())


def _flight_record(*, collectives: bool) -> dict[str, Any]:
    """What torch recorded; NCCL keeps a record of its own, and a build without it has no function to ask."""
    record: dict[str, Any] = {"entries": [], "pg_status": {}}
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            part = pickle.loads(dump(collectives, collectives, False))
            record["entries"] += part.get("entries", [])
            record["pg_status"][name] = part.get("pg_status")
    return record
