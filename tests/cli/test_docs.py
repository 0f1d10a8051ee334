"""Every command in docs/command_line.md is one that the command line accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from colossalai.cli.app import cli
from colossalai.cli.job import Job
from tests.cli.tools import ROOT

PAGE = (ROOT / "docs" / "command_line.md").read_text()


def all_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


COMMANDS = [line for line in all_commands() if line.startswith("colossalai run")]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[Job] = []

    class Recorder:
        def __init__(self, job: Job) -> None:
            jobs.append(job)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("colossalai.cli.run.Launcher", Recorder)
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("host1\nhost2\nhost3\n")
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    (job,) = jobs
    assert job.script.startswith(("train.py", "my_package.train"))


@pytest.mark.parametrize("command", [c for c in all_commands() if c.startswith("colossalai benchmark")])
def test_benchmark(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("colossalai.cli.benchmark.command._devices", lambda device, gpus: ("cpu", gpus))
    monkeypatch.setattr("colossalai.cli.benchmark.command._run", lambda gpus, *_: seen.append(gpus))
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert seen[0] in (4, 8)


def test_page_has_commands() -> None:
    assert len(COMMANDS) >= 8
