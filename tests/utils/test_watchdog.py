from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from colossalai import launch
from colossalai.testing import spawn
from colossalai.utils.watchdog import Frame, Issued, RankSnapshot, Wait, Watchdog, explain, take_snapshot
from colossalai.utils.watchdog.snapshot import show_ranks

TIMEOUT = 0.5


def start(rank: int, world_size: int, port: int) -> dist.Store:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def be_late(rank: int, world_size: int, port: int) -> tuple[str, int]:
    """Rank 1 keeps the others waiting until there is a report, and a while longer."""
    store = start(rank, world_size, port)
    # the main thread blocks in calls on ``store``
    for_reports, for_release = (dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))

    def report(text: str) -> None:
        for_reports.set(f"report {for_reports.add('reports', 1)}", text)

    def release_later() -> None:
        for_release.wait(["report 1"])
        with pytest.raises(dist.DistStoreError):
            for_release.wait(["report 2"], timedelta(seconds=2 * TIMEOUT))
        for_release.set("release", "")

    with Watchdog(timeout=TIMEOUT, report=report):
        if rank == 1:
            threading.Thread(target=release_later).start()
            store.get("release")
        dist.all_reduce(torch.ones(1))
    return store.get("report 1").decode(), store.add("reports", 0)


class Heard(io.StringIO):
    """A stream that tells the other rank what was written to it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def write(self, text: str) -> int:
        if "has not moved" in text:
            self.store.set("heard", text)
        return len(text)


def be_late_in_a_job(rank: int, world_size: int, port: int) -> str:
    """The variable starts the watchdogs; rank 1 comes to the collective when one has spoken."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSALAI_WATCHDOG_TIMEOUT", "soon")
        with pytest.raises(ValueError, match="COLOSSALAI_WATCHDOG_TIMEOUT must be a positive number"):
            launch({}, rank, world_size, "127.0.0.1", port, "gloo", verbose=False)
        patch.setenv("COLOSSALAI_WATCHDOG_TIMEOUT", str(TIMEOUT))
        patch.setattr(sys, "stderr", Heard(port))
        launch({}, rank, world_size, "127.0.0.1", port, "gloo", verbose=False)
        if rank == 1:
            store.wait(["heard"])
        dist.all_reduce(torch.ones(1))
    return store.get("heard").decode()


def test_a_variable_starts_it_in_a_launched_job() -> None:
    text, _ = spawn(be_late_in_a_job, 2)
    assert re.search(r"(?m)^rank 0 waits in all_reduce", text)
    assert re.search(r"(?m)^rank 1 is at .* in be_late_in_a_job", text)


def test_a_job_that_stands_still_is_reported_once_with_all_ranks() -> None:
    results = spawn(be_late, 3)
    assert len(set(results)) == 1, "one rank reports"
    text, reports = results[0]
    assert reports == 1
    assert re.match(r"rank \d has not moved for 0.5 s; the job waits on\.\n", text)
    assert re.search(
        r"(?m)^ranks 0, 2 wait in all_reduce \(all 3 ranks\) called at tests/utils/test_watchdog.py:", text
    )
    assert re.search(
        r'(?m)^rank 1 is at tests/utils/test_watchdog.py:\d+ in be_late: store.get\("release"\)$', text
    )
    assert "collectives issued on all 3 ranks: 1 by ranks 0, 2, " in text
    assert text.count("innermost call last") == 2, "ranks with equal stacks share one"


def keep_moving(rank: int, world_size: int, port: int) -> int:
    store = start(rank, world_size, port)
    timeout = 2.0  # a busy machine may keep a rank from moving for a while
    end = time.monotonic() + 1.5 * timeout
    x, going = torch.ones(1), torch.ones(1)
    with Watchdog(timeout=timeout, report=lambda text: store.set("report", text)):
        while going.item():
            dist.all_reduce(x)
            going.fill_(time.monotonic() < end)
            dist.broadcast(going, src=0)
    return store.check(["report"])


def test_a_job_that_moves_is_not_reported() -> None:
    assert spawn(keep_moving, 2) == [False, False]


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class LostStore:
    def add(self, key: str, value: int) -> int:
        raise dist.DistNetworkError("connection reset")


@pytest.mark.usefixtures("alone")
def test_a_lost_store_ends_the_watchdog_with_a_word() -> None:
    told = threading.Event()
    texts = []

    def report(text: str) -> None:
        texts.append(text)
        told.set()

    watchdog = Watchdog(timeout=0.1, report=report)
    watchdog._store = LostStore()
    with watchdog:
        assert told.wait(10)
    assert re.match(
        r"(?s)the watchdog of rank 0 lost the store of the job and ends: connection reset\nrank 0 is at ",
        texts[0],
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"in seconds and must be positive, got {timeout}"):
        Watchdog(timeout=timeout)


def test_a_watchdog_needs_the_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"needs the process group .* call colossalai.launch first"):
        Watchdog()


def test_a_snapshot_shows_the_other_threads() -> None:
    snapshots = []
    release = threading.Event()

    def look() -> None:
        snapshots.append(take_snapshot())
        release.set()

    thread = threading.Thread(target=look, name="looker")
    thread.start()
    release.wait()
    thread.join()
    (snapshot,) = snapshots
    name, frames = snapshot.threads[0]
    assert name == "MainThread"
    assert [f.name for f in frames if f.file == __file__] == ["test_a_snapshot_shows_the_other_threads"]
    assert "looker" not in dict(snapshot.threads)
    assert snapshot.wait is None


HERE = Frame(__file__, 1, "train")
LIBRARY = Frame(take_snapshot.__code__.co_filename, 1, "reduce")


def snapshot(kind: str | None = None, count: int = 0, caller: Frame = HERE) -> RankSnapshot:
    issued = (Issued("all_reduce", "axis tp: ranks 0, 1, 2", "5", (0, 1, 2), count, HERE),) if count else ()
    wait = Wait(kind, "axis tp: ranks 0, 1, 2", caller, HERE) if kind else None
    return RankSnapshot((("MainThread", (HERE,)),), wait, issued)


def test_the_report_groups_ranks_and_names_those_behind() -> None:
    states = {0: snapshot("all_reduce", 3), 1: snapshot("all_reduce", 3), 2: snapshot(None, 2), 3: None}
    text = explain({**states, 4: snapshot(None, 0).leave()}, stacks=False)
    assert text.splitlines() == [
        "ranks 0, 1 wait in all_reduce (axis tp: ranks 0, 1, 2) called at tests/utils/test_watchdog.py:1 in"
        " train",
        "rank 2 is at tests/utils/test_watchdog.py:1 in train: from __future__ import annotations; its last"
        " collective was all_reduce issued at tests/utils/test_watchdog.py:1 in train on axis tp: ranks 0,"
        " 1, 2",
        "rank 3 does not answer: the process is stopped, or a call into C holds the interpreter lock",
        "rank 4 has left the function",
        "collectives issued on axis tp: ranks 0, 1, 2: 3 by ranks 0, 1, the last being all_reduce issued at "
        "tests/utils/test_watchdog.py:1 in train; 2 by rank 2",
    ]


def test_the_report_leads_from_the_library_to_the_user() -> None:
    text = explain({0: snapshot("all_gather", caller=LIBRARY)}, stacks=False)
    assert re.search(
        r"called at .*snapshot.py:1 in reduce, reached from tests/utils/test_watchdog.py:1 in train", text
    )


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([5], "5"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 4, 6, 7], "0-2, 4, 6, 7"),
        (range(1024), "0-1023"),
        (range(0, 64, 2), "0, 2, 4, 6, 8, 10, 12, 14, ..., 62"),
    ],
)
def test_many_ranks_take_little_space(ranks: list[int], shown: str) -> None:
    assert show_ranks(ranks) == shown
