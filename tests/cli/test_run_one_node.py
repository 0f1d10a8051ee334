"""`colossalai run` on this machine: what the script sees, and every way a job can end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.tools import ROOT, Command, Result, free_port, run, survivors, wait_until

HERE = Path(__file__).parent
WORKER = HERE / "worker.py"


def start(
    folder: Path, action: str, *, stop_timeout: float = 1.0, script: Sequence[object] = (WORKER,)
) -> Command:
    folder.mkdir(exist_ok=True)
    env = {"COLOSSALAI_STOP_TIMEOUT": str(stop_timeout), "TMPDIR": str(folder)}
    options = ["--nproc_per_node", 2, "--master_port", free_port(), *script[:-1]]
    return Command("run", *options, script[-1], folder, action, 1, env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One job per kind of failure.

    They run side by side: most of their time is torch's import and waiting.
    """
    folder = tmp_path_factory.mktemp("failed")
    module = ("--extra_launch_args", "max_restarts=0", "-m", "tests.cli.worker")
    jobs = {
        action: start(folder / action, action, script=module if action == "exit" else (WORKER,))
        for action in ("raise", "exit", "kill", "linger", "leave")
    }
    results = {action: command.finish() for action, command in jobs.items()}
    for action, result in results.items():
        assert_clean(result, folder / action)
    return results


def all_ranks_are_here(folder: Path, nproc: int = 2) -> None:
    wait_until(lambda: len(list(folder.glob("waiting_*"))) == nproc, seconds=30, what="the ranks")


def assert_clean(result: Result, folder: Path) -> None:
    assert not result.survivors, result
    assert not list(folder.glob("colossalai_run_*")), "the agent left its folder"
    for noise in ("ChildFailedError", "Setting OMP_NUM_THREADS", "torch.distributed.elastic"):
        assert noise not in result.err, result


def test_script_sees_the_same_world_as_under_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "inspect_me.py"
    script.write_text((HERE / "inspect_me.py").read_text())
    arguments = ["--", "--lr", "0.1", "--host=x", "-s", "two words", "--", "--nproc_per_node"]
    # torchrun would take these for its own options
    arguments += ["--n", "6", "--m=3", "-m", "no_module", "--no", "-h"]
    environment = {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # so auto is one process
    options = ["--nproc-per-node", "auto", "--master_port", free_port()]
    result = run("run", *options, "inspect_me.py", *arguments, cwd=tmp_path, env=environment)
    assert result.code == 0, result
    facts = json.loads(result.out)
    assert facts == {
        "argv": ["inspect_me.py", *arguments],
        "file": str(script),
        "path0": str(tmp_path),
        "annotation": "<class 'int'>",
        "thing": "__main__",
        "child": "__mp_main__",
        "threads": str(len(os.sched_getaffinity(0))),
        "ours": [],
        "world": "1",
    }
    assert result.err == "\r1/3\r2/3\r3/3"  # a progress bar passes through as it is
    assert_clean(result, tmp_path)


def test_exception_on_one_rank(failed: dict[str, Result]) -> None:
    result = failed["raise"]
    assert result.code == 1, result
    assert sorted(result.out.splitlines()) == ["rank 0 of 2 is here", "rank 1 of 2 is here"]
    assert result.err.count("Traceback (most recent call last)") == 1, result
    assert result.err.count("ValueError: boom on purpose") == 1
    assert "= rank 1 failed =" in result.err
    assert 'worker.py", line' in result.err
    assert "_rank.py" not in result.err  # none of our frames


def test_exit_code_of_a_module(failed: dict[str, Result]) -> None:
    result = failed["exit"]
    assert result.code == 7, result
    assert "the script called sys.exit(7)" in result.err
    assert "Traceback" not in result.err


def test_rank_killed(failed: dict[str, Result]) -> None:
    result = failed["kill"]
    assert result.code == 128 + signal.SIGKILL, result
    assert "rank 1 (local rank 1) ended with exit code 137 (SIGKILL)" in result.err
    assert "short of memory" in result.err


def test_rank_ended_too_early_with_exit_code_0(failed: dict[str, Result]) -> None:
    result = failed["leave"]
    assert result.code == 1, result
    assert "= rank 1 ended too early =" in result.err
    assert_matches(result, r"\nrank 1 ended with exit code 0 after \d+\.\d s, before the others\n")
    assert "rank 0 (local rank 0) ended with exit code 1" in result.err
    assert result.err.count("RuntimeError: [gloo] Connection closed by peer") == 1


def test_rank_raised_but_its_process_goes_on(failed: dict[str, Result]) -> None:
    result = failed["linger"]
    assert result.code == 1, result
    assert result.err.count("ValueError: boom on purpose") == 1


def test_ctrl_c_lets_ranks_save_and_a_second_signal_kills(tmp_path: Path) -> None:
    command = start(tmp_path, "save", stop_timeout=600)
    all_ranks_are_here(tmp_path)
    command.process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "saved").exists, seconds=20, what="the rank to save")
    assert command.process.poll() is None, "the stubborn rank still has its time"
    command.process.send_signal(signal.SIGTERM)
    result = command.finish(20)
    assert result.code == 130, result
    assert "SIGINT: stopping all processes" in result.err
    assert "Traceback" not in result.err
    assert "failed" not in result.err, "an interrupt that was asked for is no failure"
    assert_clean(result, tmp_path)


def test_ctrl_c_names_a_rank_that_had_left(tmp_path: Path) -> None:
    """The other rank waits for it, and the user gives up."""
    command = start(tmp_path, "quit")
    wait_until(
        lambda: all((tmp_path / file).exists() for file in ("left_1", "waiting_0")), seconds=30, what="ranks"
    )
    notes = next(tmp_path.glob("colossalai_run_*"))
    wait_until((notes / "ended_1.json").exists, seconds=20, what="the end of the rank")
    command.process.send_signal(signal.SIGINT)
    result = command.finish(20)
    assert result.code == 130, result
    assert_matches(result, r"\nrank 1 ended with exit code 0 after \d+\.\d s, before the others\n$")
    assert_clean(result, tmp_path)


def test_nothing_outlives_any_of_us(tmp_path: Path) -> None:
    """SIGKILL the launcher, the agent, torchrun: the ranks, which ignore SIGTERM, are gone soon after."""
    jobs = {victim: start(tmp_path / victim, "wait") for victim in ("launcher", "node_agent", "_torchrun")}
    for victim, command in jobs.items():
        all_ranks_are_here(tmp_path / victim)
        pids = [pid for pid, line in survivors(command.mark).items() if f"colossalai.cli.{victim}" in line]
        (pid,) = pids or [command.process.pid]
        os.kill(pid, signal.SIGKILL)
    for victim, command in jobs.items():
        wait_until(
            lambda command=command: not survivors(command.mark), seconds=15, what=f"the end after {victim}'s"
        )
    results = {victim: command.finish(10) for victim, command in jobs.items()}
    assert results["launcher"].code == -signal.SIGKILL
    assert results["node_agent"].code == results["_torchrun"].code == 1
    assert_matches(results["node_agent"], "the node agent on localhost ended with exit code 137 .SIGKILL.")
    assert_matches(results["_torchrun"], "torchrun ended with exit code 137 .SIGKILL. and left no report")


def assert_matches(result: Result, pattern: str) -> None:
    assert re.search(pattern, result.err), result


def test_reader_of_our_output_leaves(tmp_path: Path) -> None:
    """As in `colossalai run ... | head`.  Two names of this machine make two nodes without ssh."""
    env = {"COLOSSALAI_STOP_TIMEOUT": "1", "TMPDIR": str(tmp_path)}
    hosts = ["--host", "localhost,127.0.0.1", "--master_addr", "127.0.0.2", "--master_port", free_port()]
    command = Command("run", *hosts, "--nproc_per_node", 1, WORKER, tmp_path, "talk", 1, env=env)
    assert command.process.stdout
    lines = [command.process.stdout.readline() for _ in range(10)]
    assert b"127.0.0.1: a line\n" in lines
    command.process.stdout.close()
    command.process.stdout = None
    wait_until(lambda: command.process.poll() is not None, seconds=20, what="the launcher")
    assert command.process.returncode == 128 + signal.SIGPIPE
    assert not survivors(command.mark)


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run("run", "--nproc_per_node", 2, "--master_port", port, WORKER, tmp_path, "exit", 0)
    assert result.code == 1, result
    assert_matches(
        result, f"^Error: port {port} cannot be used.*Address already in use.*--master_port {port + 1}\n$"
    )


def test_address_out_of_reach(tmp_path: Path) -> None:
    options = ["--nproc_per_node", 2, "--master_port", free_port(), "--master_addr", "no-such-host.invalid"]
    result = run("run", *options, WORKER, tmp_path, "exit", 0)
    assert result.code == 1, result
    assert_matches(
        result, r"^Error: cannot reach no-such-host.invalid port \d+: .*--master_addr must be.*\n$"
    )


def test_missing_script(tmp_path: Path) -> None:
    options = ["--nproc_per_node", 2, "--master_port", free_port()]
    result = run("run", *options, "nowhere.py", cwd=tmp_path)
    assert result.code == 1, result
    assert_matches(result, rf"^Error: no such script: nowhere.py \(looked in {tmp_path}\)\n$")
