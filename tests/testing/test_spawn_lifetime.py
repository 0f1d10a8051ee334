"""No process of ``spawn`` outlives it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from colossalai.testing import RankError, spawn
from colossalai.testing._handle import RankHandle


def _note(directory: Path, pid: int) -> None:
    (directory / f"{pid}.partial").touch()
    (directory / f"{pid}.partial").rename(directory / str(pid))


def _wait_for_notes(directory: Path, count: int) -> set[int]:
    """The processes that have left a note, once there are ``count``."""
    while len(noted := [p for p in directory.iterdir() if not p.suffix]) < count:
        time.sleep(0.01)
    return {int(p.name) for p in noted}


def _alive(pids: Iterable[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    return {pid for pid in pids if _state(pid) not in (None, "Z", "X")}


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _all_end(pids: Iterable[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while (alive := _alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive


def stay(rank: int, world_size: int, port: int, directory: Path) -> None:
    """Start a process, leave notes, and wait forever: rank 0 in Python, rank 1 inside C with the interpreter
    lock.
    """
    sleeper = subprocess.Popen(["sleep", "1000"])
    _note(directory, sleeper.pid)
    _note(directory, os.getpid())
    if rank == 0:
        threading.Event().wait()
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the lock


def leave_process_behind(rank: int, world_size: int, port: int, directory: Path) -> None:
    _note(directory, subprocess.Popen(["sleep", "1000"]).pid)
    _note(directory, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def parent_that_is_killed(rank: int, world_size: int, port: int, directory: Path) -> None:
    def kill_self() -> None:
        _wait_for_notes(directory, 4)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_self, daemon=True).start()
    spawn(stay, 2, directory=directory)


def test_interrupted_parent_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        _wait_for_notes(tmp_path, 4)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        spawn(stay, 2, directory=tmp_path)
    thread.join()
    assert _all_end(_wait_for_notes(tmp_path, 4))


def test_an_interrupt_while_ranks_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = RankHandle.start

    def start(handle: RankHandle) -> None:
        begin(handle)
        if handle.rank == 1:
            _wait_for_notes(tmp_path, 4)
            raise KeyboardInterrupt

    monkeypatch.setattr(RankHandle, "start", start)
    with pytest.raises(KeyboardInterrupt):
        spawn(stay, 2, directory=tmp_path)
    assert _all_end(_wait_for_notes(tmp_path, 4))


def test_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        spawn(parent_that_is_killed, 1, directory=tmp_path)
    assert _all_end(_wait_for_notes(tmp_path, 4))


def test_processes_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        spawn(leave_process_behind, 2, directory=tmp_path)
    assert _all_end(_wait_for_notes(tmp_path, 4))
