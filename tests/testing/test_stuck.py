"""Ranks that do not finish: each of eight is stuck in its own way, and the report tells them apart."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colossalai.mesh import Mesh
from colossalai.testing import RankError, spawn
from colossalai.testing._handle import RankHandle
from colossalai.testing._progress import Progress, Pulse

TIMEOUT = 5.0


def _reduce_in_thread() -> None:
    dist.all_reduce(torch.ones(1))


def stuck(rank: int, world_size: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    tp = Mesh({"dp": world_size // 2, "tp": 2}).group("tp")
    x = torch.ones(1)
    (folder / str(rank)).write_text(str(time.monotonic()))
    if rank == 1:
        dist.all_reduce(x)
    elif rank == 2:
        dist.broadcast(x, src=3, group=tp)
    elif rank == 3:
        dist.recv(x, src=2)
    elif rank == 4:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    elif rank == 5:
        thread = threading.Thread(target=_reduce_in_thread, name="side thread")
        thread.start()
        thread.join()
    elif rank == 6:
        ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter lock
    elif rank == 7:
        dist.all_gather_object([None] * world_size, rank)


def line_of(text: str) -> str:
    """``path:line`` of the only line of ``stuck`` that contains ``text``."""
    lines, first = inspect.getsourcelines(stuck)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return rf"tests/testing/test_stuck\.py:{number} in stuck"


@pytest.fixture(scope="module")
def error(tmp_path_factory: pytest.TempPathFactory) -> RankError:
    folder = tmp_path_factory.mktemp("stuck")
    with pytest.raises(RankError) as caught:
        spawn(stuck, 8, timeout=TIMEOUT, folder=folder)
    since = max(float(path.read_text()) for path in folder.iterdir())
    assert time.monotonic() - since < TIMEOUT + 15, "the report itself must not take long"
    return caught.value


def test_the_error_says_how_many_and_is_a_timeout(error: RankError) -> None:
    assert str(error).startswith("7 of 8 ranks did not finish, and made no progress for 5 s\n")
    assert (error.rank, error.cause_type) == (1, TimeoutError)


EVERYONE = "all 8 ranks"


@pytest.mark.parametrize(
    ("expected", "line"),
    [
        pytest.param(r"rank 0 has left the function$", None, id="finished"),
        pytest.param(
            rf"rank 1 waits in all_reduce \({EVERYONE}\) called at ", "all_reduce(x)\n", id="collective"
        ),
        pytest.param(r"rank 2 waits in broadcast \(axis tp: ranks 2, 3\) called at ", "broadcast", id="axis"),
        pytest.param(rf"rank 3 waits in recv from rank 2 \({EVERYONE}\) called at ", "recv", id="receive"),
        pytest.param(r"rank 4 is at ", "work.wait()", id="handle"),
        pytest.param(
            r"rank 4 is at .*: work.wait\(\); its last collective was all_reduce issued at ",
            "async_op=True",
            id="handle-origin",
        ),
        pytest.param(
            r"rank 5 waits in all_reduce \(.*\) called at .* in _reduce_in_thread", None, id="thread"
        ),
        pytest.param(r"rank 6 does not answer: ", None, id="mute"),
        pytest.param(
            r"rank 7 waits in all_gather_object \(.*\) called at ", "all_gather_object", id="objects"
        ),
    ],
)
def test_each_rank_is_explained(error: RankError, expected: str, line: str | None) -> None:
    pattern = expected + (line_of(line) if line else "")
    assert re.search(f"(?m)^{pattern}", str(error)), f"{pattern}\nnot in\n{error}"


def test_ranks_that_skipped_the_collective_are_counted(error: RankError) -> None:
    pattern = (
        rf"(?m)^collectives issued on {EVERYONE}: 1 by ranks 1, 4, 5, 7, the last being all_\w+ issued at .*"
    )
    assert re.search(rf"{pattern}; none by ranks 0, 2, 3$", str(error)), error


def test_every_stack_is_shown_with_its_threads(error: RankError) -> None:
    stacks = str(error).split("innermost call last:")
    assert len(stacks) == 7, "six ranks answered with different stacks"
    assert re.search(r"(?s)rank 5, $", stacks[4])
    assert re.search(r"(?s)MainThread:.*thread\.join\(\).*side thread:.*in _reduce_in_thread", stacks[5])
    assert "multiprocessing" not in stacks[1], "frames of the harness are noise"


def test_a_rank_that_cannot_answer_shows_its_stack_all_the_same(error: RankError) -> None:
    assert re.search(r'(?s)rank 6, the end of its output:.*test_stuck\.py", line \d+ in stuck', str(error)), (
        error
    )


def compute_for(rank: int, world_size: int, port: int, seconds: float) -> int:
    """One rank computes, then a process that it starts; the other rank waits for it."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    end = time.monotonic() + seconds
    steps = torch.zeros(1)
    while rank == 0 and time.monotonic() < end:
        steps += torch.randn(64, 64).mean() * 0 + 1
    if rank == 0:
        code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", code], check=True)
    dist.all_reduce(steps)
    return int(steps)


def test_ranks_that_get_on_may_take_longer() -> None:
    counts = spawn(compute_for, 2, timeout=2, seconds=3)
    assert counts[0] == counts[1] > 1


class Waiting:
    """A rank that uses no CPU: it waits for something outside, and prints now and then."""

    is_done = False
    last_output = 0.0

    def __init__(self) -> None:
        self.now = 0.0
        self.ask_pulse()

    def ask_pulse(self) -> None:
        self.pulse: Pulse | None = Pulse(self.now, 1.0, None)


def test_a_rank_that_prints_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Waiting()
    monkeypatch.setattr("colossalai.testing._progress.time.monotonic", lambda: rank.now)
    progress = Progress([rank], timeout=60)
    for rank.now in range(10, 300, 10):
        if rank.now % 50 == 0:
            rank.last_output = rank.now
        assert not progress.has_stopped(), rank.now
    stopped = [rank.now for rank.now in range(300, 400, 10) if progress.has_stopped()]
    assert stopped[0] == 250 + 60, "silent since 250"


def said(rank: int, world_size: int, port: int) -> None:
    print("said", rank)


def test_output_of_ranks_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        RankHandle, "close", lambda self, end=RankHandle.close: (end(self), seen.append(self.last_output))
    )
    before = time.monotonic()
    spawn(said)
    assert before <= seen[0] <= time.monotonic()


def test_what_counts_as_progress() -> None:
    start = Pulse(when=0, cpu=5, place=None)
    assert Pulse(10, 5.2, None).shows_progress_since(start)
    assert not Pulse(10, 5.05, None).shows_progress_since(start), "it polls now and then"
    on_cuda = Pulse(0, 5, place=1)
    assert not Pulse(10, 14, 1).shows_progress_since(on_cuda), "waiting for CUDA uses the CPU"
    assert Pulse(10, 14, 2).shows_progress_since(on_cuda)


def wait_for_rank_0(rank: int, world_size: int, port: int) -> None:
    if rank == 0:
        return
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")


def test_a_group_that_is_never_complete() -> None:
    with pytest.raises(
        RankError, match=r"ranks 1, 2 wait in init_process_group \(no process group yet\) called at"
    ):
        spawn(wait_for_rank_0, 3, timeout=3)
