"""Several hosts over a real ssh: what travels, and how everything ends everywhere."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.tools import ROOT, Command, Result, free_port, run, survivors, wait_until
from tests.launch_real.services import SSH_HOSTS, missing

WORKER = ROOT / "tests" / "cli" / "worker.py"
FIRST, SECOND = SSH_HOSTS
ODD = 'it\'s "odd" $HOME `ls` \\ \n * \t \u00e9'


def options(ssh: dict[str, str], *more: object) -> list[object]:
    hosts = ["--host", f"{FIRST},{SECOND}", "--master_addr", FIRST, "--ssh-port", ssh["TEST_SSH_PORT"]]
    return ["run", *hosts, "--master_port", free_port(), "--nproc_per_node", 2, *more]


def start(ssh: dict[str, str], folder: Path, action: str) -> Command:
    env = {**ssh, "COLOSSALAI_STOP_TIMEOUT": "1", "ODD_VALUE": ODD}
    workplace = folder / "a 'place' with spaces"
    workplace.mkdir(parents=True)
    return Command(*options(ssh), WORKER, folder, action, 3, env=env, cwd=workplace)


@contextmanager
def running(ssh: dict[str, str], folder: Path) -> Iterator[Command]:
    command = start(ssh, folder, "wait")
    wait_until(lambda: len(list(folder.glob("waiting_*"))) == 4, seconds=40, what="the ranks")
    assert sum("node_agent" in line for line in survivors(command.mark).values()) >= 2, (
        "the agents are marked"
    )
    yield command
    wait_until(lambda: not survivors(command.mark), seconds=15, what="all processes on all hosts to end")


def test_failure_on_one_host_stops_the_other(ssh: dict[str, str], tmp_path: Path) -> None:
    result = start(ssh, tmp_path, "raise").finish()
    assert (result.code, result.survivors) == (1, {}), result
    assert result.err.count("ValueError: boom on purpose") == 1
    assert f"rank 3 (local rank 1) on {SECOND} ended with exit code 1" in result.err
    ranks, end = result.out.split("\n====== Training on All Nodes =====\n")
    assert end == (
        f"{FIRST}: failure\n"
        f"{SECOND}: failure\n\n====== Stopping All Nodes =====\n{FIRST}: finish\n{SECOND}: finish\n"
    )
    place = str(tmp_path / "a 'place' with spaces")
    for host, number in ((FIRST, 0), (FIRST, 1), (SECOND, 2), (SECOND, 3)):
        assert f"{host}: rank {number} of 4 is here\n" in ranks
    seen = [json.loads(line.split(": ", 1)[1]) for line in ranks.splitlines() if "[" in line]
    assert seen == [[ODD, place]] * 4
    assert all(line.startswith((f"{FIRST}: ", f"{SECOND}: ")) for line in ranks.splitlines())


def test_launcher_killed(ssh: dict[str, str], tmp_path: Path) -> None:
    with running(ssh, tmp_path) as command:
        command.process.kill()
        command.process.communicate()


def test_connection_lost(ssh: dict[str, str], tmp_path: Path) -> None:
    with running(ssh, tmp_path) as command:
        (client,) = (
            pid
            for pid, line in survivors(command.mark).items()
            if line.startswith("ssh ") and f" {SECOND} " in line
        )
        os.kill(client, signal.SIGKILL)
        result = command.finish(20)
    assert result.code == 1, result
    assert_error(result, rf"lost the connection to host {SECOND}, ssh ended with exit code 137 \(SIGKILL\)")
    assert result.out.endswith(f"{FIRST}: finish\n{SECOND}: no answer\n")


def assert_error(result: Result, pattern: str) -> None:
    assert result.code == 1, result
    assert re.search(f"^Error: {pattern}", result.err, re.MULTILINE), result
    assert "Traceback" not in result.err, result


def test_master_out_of_reach(ssh: dict[str, str], tmp_path: Path) -> None:
    master = ("--master_addr", "no-such-host.invalid")
    result = run(*options(ssh, *master), WORKER, tmp_path, "exit", 0, env=ssh)
    assert_error(
        result, rf"({FIRST}|{SECOND}): cannot reach no-such-host.invalid port \d+: .*--master_addr must be"
    )


def test_script_is_missing_there(ssh: dict[str, str], tmp_path: Path) -> None:
    result = run(*options(ssh), "nowhere.py", env=ssh, cwd=tmp_path)
    assert_error(result, rf"({FIRST}|{SECOND}): no such script: nowhere.py \(looked in {tmp_path}\)")


def test_key_is_not_accepted(ssh: dict[str, str], tmp_path: Path) -> None:
    env = {**ssh, "COLOSSALAI_SSH_OPTIONS": ssh["COLOSSALAI_SSH_OPTIONS"].replace("user_key", "host_key")}
    result = run(*options(ssh), WORKER, tmp_path, "exit", 0, env=env)
    assert_error(result, rf"cannot reach host ({FIRST}|{SECOND}) by ssh: .*Permission denied")


@pytest.mark.skipif(missing("ssh") is not None, reason=str(missing("ssh")))
def test_nobody_listens(tmp_path: Path) -> None:
    nowhere = {"TEST_SSH_PORT": str(free_port()), "COLOSSALAI_SSH_OPTIONS": "-F /dev/null"}
    result = run(*options(nowhere), WORKER, tmp_path, "exit", 0, env=nowhere)
    assert_error(result, rf"cannot reach host ({FIRST}|{SECOND}) by ssh: .*Connection refused")
    assert not result.survivors
