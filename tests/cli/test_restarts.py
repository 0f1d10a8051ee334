"""``colossalai run --max-restarts``: a failed job starts again, says why, and still obeys."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from colossalai.cli._torchrun import Restarts
from tests.cli.tools import ROOT, Command, Result, free_port, wait_until

SCRIPT = Path(__file__).with_name("restarted.py")


def start(folder: Path, *arguments: object, restarts: int, launch: tuple[object, ...] = ()) -> Command:
    folder.mkdir(exist_ok=True)
    env = {"COLOSSALAI_STOP_TIMEOUT": "1", "TMPDIR": str(folder)}
    options = launch or ("--nproc_per_node", 2)
    options = (*options, "--master_port", free_port(), "--max-restarts", restarts)
    return Command("run", *options, SCRIPT, folder, *arguments, env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The jobs run side by side: most of their time is torch's import and waiting."""
    folder = tmp_path_factory.mktemp("restarts")
    hosts = ("--nproc_per_node", 1, "--host", "localhost,127.0.0.1", "--master_addr", socket.gethostname())
    jobs = {
        "survived": start(folder / "survived", 2, "raise", "end", restarts=2),
        "lingering": start(folder / "lingering", 1, "linger", "end", restarts=1),
        "too often": start(folder / "too often", 2, "raise", "end", restarts=1),
        "two hosts": start(folder / "two hosts", 1, "raise", "end", restarts=2, launch=hosts),
    }
    found = {name: command.finish(120) for name, command in jobs.items()}
    for result in found.values():
        assert not result.survivors, result
        assert "torch.distributed.elastic" not in result.err
    return found


def test_each_failure_is_shown_once(results: dict[str, Result]) -> None:
    result = results["survived"]
    assert result.code == 0, result
    for attempt in (0, 1, 2):
        assert all(f"start {attempt} of rank {rank}\n" in result.out for rank in (0, 1))
    for attempt in (0, 1):
        assert result.err.count(f"ValueError: boom number {attempt}") == 1
        assert f"restart {attempt + 1} of 2: all processes start again" in result.err
    assert result.err.count("= rank 1 failed =") == 2
    assert "rank 0" not in result.err, "it was stopped by us"


def test_a_rank_that_lingers_is_killed_and_all_start_again(results: dict[str, Result]) -> None:
    result = results["lingering"]
    assert result.code == 0, result
    assert result.err.count("ValueError: boom number 0") == 1
    assert "restart 1 of 1" in result.err


def test_the_last_failure_is_the_end(results: dict[str, Result]) -> None:
    result = results["too often"]
    assert result.code == 1, result
    assert result.err.count("restart 1 of 1: all processes start again") == 1
    assert result.err.count("ValueError: boom number 1") == 1
    assert result.err.rstrip().endswith("=")


def test_a_failure_on_one_host_restarts_the_other(results: dict[str, Result]) -> None:
    result = results["two hosts"]
    assert result.code == 0, result
    assert "localhost: processes on another host failed\nlocalhost: restart 1 of 2" in result.err
    assert "127.0.0.1: ValueError: boom number 0\n" in result.err
    assert "localhost: start 1 of rank 0\n" in result.out
    assert "127.0.0.1: start 1 of rank 1\n" in result.out


def test_a_restarted_job_obeys_ctrl_c(tmp_path: Path) -> None:
    command = start(tmp_path, 1, "raise", "wait", restarts=3)
    wait_until(lambda: len(list(tmp_path.glob("waiting_1_*"))) == 2, seconds=60, what="the second start")
    command.process.send_signal(signal.SIGINT)
    result = command.finish(30)
    assert result.code == 130, result
    assert not result.survivors
    assert "restart 2" not in result.err


def test_an_order_to_stop_while_ranks_are_ended_is_obeyed(tmp_path: Path) -> None:
    """Rank 0 does not end by SIGTERM, so there is a second before it is killed and all would start again."""
    command = start(tmp_path, 3, "raise", "end", restarts=3)
    wait_until(lambda: (tmp_path / "waiting_0_0").exists(), seconds=60, what="the first start")
    command.process.send_signal(signal.SIGTERM)
    result = command.finish(30)
    assert result.code == 128 + signal.SIGTERM, result
    assert not result.survivors
    assert "start 2 of rank" not in result.out


def test_an_order_to_stop_between_two_closings_of_an_attempt_is_obeyed(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, lambda failed: [])
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        restarts.closing(lambda: os.kill(os.getpid(), signal.SIGTERM))  # torch has seen a failed rank
        assert not heard
        restarts._said = "restart 1 of 1"
        restarts.closing(lambda: None)  # before all start again
        assert heard == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
