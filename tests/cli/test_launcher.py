"""The launcher against agents that do not behave; real agents are in the other files."""

from __future__ import annotations

import signal

import pytest
from click import ClickException

from colossalai.cli import launcher
from colossalai.cli.job import LaunchJob
from colossalai.cli.launcher import Launcher

JOB = LaunchJob(
    hosts=(), nproc_per_node=1, master_addr="127.0.0.1", master_port=1, script="x.py", stop_timeout=0.1
)


def replace_agent(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    def command(module: str, arguments: list[str]) -> list[str]:
        return ["bash", "-c", f"exec >&{arguments[1]}; printf '{says}'; exec sleep 60"]

    monkeypatch.setattr("colossalai.cli.launcher.module_command", command)


def test_agent_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose login shell hangs."""
    replace_agent(monkeypatch, "")
    monkeypatch.setattr(launcher, "_READY_TIMEOUT", 0.2)
    with pytest.raises(ClickException, match=r"no answer from localhost within 0 s"):
        Launcher(JOB).run()


def test_signal_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_agent(monkeypatch, "")
    job = Launcher(JOB)
    job._events.put((None, signal.SIGINT))
    assert job.run() == 130


def test_agent_does_not_confirm_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_agent(monkeypatch, r'colossalai node agent\nr{"event": "ready"}\nr{"event": "reached"}\n')
    monkeypatch.setattr(launcher, "_STOP_MARGIN", 0.2)
    start = Launcher._bring_up

    def start_and_stop(self: Launcher) -> None:
        start(self)
        self._events.put((None, signal.SIGTERM))

    monkeypatch.setattr(Launcher, "_bring_up", start_and_stop)
    assert Launcher(JOB).run() == 143
    said = capsys.readouterr().err
    assert "SIGTERM: stopping all processes" in said
    assert "Error: localhost did not confirm that it stopped; look there for processes left" in said


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    job = LaunchJob(hosts=("a", "b"), nproc_per_node=1, master_addr="a", master_port=1, script="x.py")
    with pytest.raises(ClickException, match=r"host a needs ssh, .*: apt-get install openssh-client"):
        Launcher(job).run()
