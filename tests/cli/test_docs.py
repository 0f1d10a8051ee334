"""Every command in command_line.md is one that the command line accepts; those about checkpoints are
run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from colossalai.cli.app import cli
from colossalai.cli.job import LaunchJob
from tests.cli.checkpoints import trained
from tests.cli.tools import ROOT

PAGE = (ROOT / "docs/source/en" / "command_line.md").read_text()


def all_commands(page: str = PAGE) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


COMMANDS = [line for line in all_commands() if line.startswith("colossalai run")]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[LaunchJob] = []

    class Recorder:
        def __init__(self, job: LaunchJob) -> None:
            jobs.append(job)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("colossalai.cli.run.Launcher", Recorder)
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("host1\nhost2\nhost3\n")
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    (job,) = jobs
    assert job.script.startswith(("train.py", "my_package.train", "colossalai"))


@pytest.mark.parametrize("command", [c for c in all_commands() if c.startswith("colossalai benchmark")])
def test_benchmark(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("colossalai.cli.benchmark.command._devices", lambda device, gpus: ("cpu", gpus))
    monkeypatch.setattr("colossalai.cli.benchmark.command._run", lambda gpus, *_: seen.append(gpus))
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert seen[0] in (4, 8)


def test_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands of both pages, on checkpoints by these names."""
    booster, model, optimizer = trained()
    booster.save(tmp_path / "checkpoints/step-000030", {"step": 30})
    booster.save(tmp_path / "runs/demo/last", {"step": 30})
    booster.save_model(model, tmp_path / "gpt2", shard=True, use_safetensors=True)
    (tmp_path / "gpt2/config.json").write_text("{}")
    booster.save_model(model, tmp_path / "sharded", shard=True)
    booster.save_optimizer(optimizer, tmp_path / "sharded", shard=True)
    monkeypatch.chdir(tmp_path)
    pages = [PAGE, (ROOT / "docs/source/en" / "checkpoints.md").read_text()]
    commands = [c for page in pages for c in all_commands(page) if c.startswith("colossalai ckpt")]
    assert len(commands) == 10
    for command in commands:
        result = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"
        shutil.rmtree("mymodel", ignore_errors=True)


def test_page_has_commands() -> None:
    assert len(COMMANDS) >= 8
