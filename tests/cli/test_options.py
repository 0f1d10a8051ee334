"""What `colossalai run` refuses before anything starts, and what it makes of the rest."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from colossalai.cli import node_agent
from colossalai.cli.app import cli
from colossalai.cli.hosts import is_this_machine, master_first
from colossalai.cli.job import LaunchJob, parse_launch_args, portable_environment, stop_timeout
from colossalai.cli.node_agent import torchrun_command


class Recorder:
    """Stands in for the launcher: keeps the job instead of running it."""

    jobs: list[LaunchJob]

    def __init__(self, job: LaunchJob) -> None:
        self.jobs.append(job)

    def run(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[LaunchJob]:
    Recorder.jobs = []
    monkeypatch.setattr("colossalai.cli.run.Launcher", Recorder)
    return Recorder.jobs


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    file = tmp_path / "hosts.txt"
    file.write_text("# our cluster\nhost1\n\n  host2  # the fast one\nuser@host3\n")
    return str(file)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


def refused(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert not Recorder.jobs
    return result.output


def assert_says(output: str, pattern: str) -> None:
    assert re.search(pattern, output, re.DOTALL), output


def test_one_machine(jobs: list[LaunchJob]) -> None:
    assert invoke("--nproc_per_node", "4", "train.py", "--config", "c.py", "-s", "--host", "x").exit_code == 0
    (job,) = jobs
    assert (job.hosts, job.nproc_per_node, job.master_addr, job.master_port) == ((), 4, "127.0.0.1", 29500)
    assert (job.script, job.script_args) == ("train.py", ("--config", "c.py", "-s", "--host", "x"))
    assert job.torchrun_options(0) == [
        "--nnodes=1",
        "--node_rank=0",
        "--rdzv_backend=static",
        "--master_addr=127.0.0.1",
        "--master_port=29500",
    ]
    order = job.order(0, remote=False, capture=False)
    assert "--nproc_per_node=4" in torchrun_command(order, Path("notes"))
    assert order["command"] == [*("train.py", "--config", "c.py", "-s", "--host", "x")]


@pytest.mark.parametrize("option", ["-H", "-host", "--host"])
def test_hosts_keep_their_order(jobs: list[LaunchJob], option: str) -> None:
    invoke(
        option,
        "b,a,c",
        "--nproc-per-node",
        "2",
        "--master_addr",
        "10.0.0.1",
        "--ssh-port",
        "2222",
        "train.py",
    )
    (job,) = jobs
    assert (job.hosts, job.ssh_port) == (("b", "a", "c"), 2222)
    assert "--node_rank=2" in job.torchrun_options(2)
    assert "--nnodes=3" in job.torchrun_options(2)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], ("host1", "host2", "user@host3")),
        (["--include", "user@host3,host1"], ("host1", "user@host3")),
        (["--exclude", "host2"], ("host1", "user@host3")),
        (["--num_nodes", "2"], ("host1", "host2")),
        (["--master_addr", "host2"], ("host2", "host1", "user@host3")),
    ],
)
def test_hostfile(jobs: list[LaunchJob], hostfile: str, options: list[str], hosts: tuple[str, ...]) -> None:
    result = invoke(
        "--hostfile", hostfile, "--nproc_per_node", "1", "--master_addr", "host1", *options, "train.py"
    )
    assert result.exit_code == 0, result.output
    assert jobs[0].hosts == hosts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hostfile nowhere.txt", "Error: Unable to find the hostfile, no such file: nowhere.txt"),
        (
            "--hostfile FILE --include host1 --exclude host2",
            "--include and --exclude are mutually exclusive, only one",
        ),
        ("--hostfile FILE --include host9", "Error: Hostname 'host9' not found in hostfile"),
        ("--hostfile FILE --exclude host9", "Error: Hostname 'host9' not found in hostfile"),
        ("--hostfile FILE --exclude host1,host2,user@host3", "leaves no host of the hostfile"),
        ("--hostfile FILE --host host1", "--host and --hostfile are mutually exclusive"),
        ("--include host1", "--include selects from a hostfile, and no --hostfile was given"),
        ("--exclude host1", "--exclude selects from a hostfile, and no --hostfile was given"),
        ("--host a,b,a", "found duplicate host a in --host a,b,a"),
        ("--host a,,b", "--host takes host names separated by commas, got 'a,,b'"),
        ("--host -oProxyCommand=x", "--host takes host names separated by commas"),
        ("--host a,b", "master_addr cannot be localhost when running on multiple nodes"),
        ("--host a,b --master_addr localhost", "for example --master_addr a"),
        ("--host a,b --master_addr a --num_nodes 3", "--num_nodes 3 asks for more hosts than the 2 given"),
        ("--num_nodes 2", "more hosts than the 1 given; add hosts with --host or --hostfile"),
        ("--num_nodes 0", "--num_nodes must be at least 1"),
        ("--nproc_per_node 0", "'--nproc_per_node': 0 is not in the range x>=1"),
        ("--nproc_per_node two", "'two' is not a valid integer.* Give a number, or one of auto, gpu, cpu"),
        ("--master_port 70000", "70000 is not in the range"),
        ("--nproc 2", "No such option"),
        ("--extra_launch_args a=1,,b", "as name=value or name, separated by commas, got 'a=1,,b'"),
        ("--extra_launch_args no_such_option=1", "torchrun refuses --extra_launch_args: .*no_such_option"),
        (
            "--extra_launch_args max_restarts=many",
            "torchrun refuses --extra_launch_args: .*max.restarts.*'many'",
        ),
        (
            "--extra_launch_args nproc_per_node=2",
            "cannot set nproc_per_node: use --nproc_per_node of colossalai run",
        ),
        ("--max-restarts -1", "'--max_restarts': -1 is not in the range x>=0"),
        ("--max-restarts 2 --extra_launch_args max_restarts=3", "say the same; use one of them"),
        (
            "--extra_launch_args rdzv-backend=c10d",
            "cannot set rdzv_backend: use --master_addr and --master_port",
        ),
    ],
)
def test_refused(hostfile: str, options: str, message: str) -> None:
    arguments = options.replace("FILE", hostfile).split()
    if "--nproc_per_node" not in arguments:
        arguments += ["--nproc_per_node", "2"]
    assert_says(refused(*arguments, "train.py"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host1\nhost2\n\nhost1 # again\n", r"found duplicate host host1 in the hostfile .*, line 4"),
        ("host1 slots=4\n", "line 1 of .* must be one host name, got 'host1 slots=4'"),
        ("# nobody\n\n", "names no host; write one host name per line"),
    ],
)
def test_bad_hostfile(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert_says(refused("--nproc_per_node", "1", "--hostfile", str(file), "train.py"), f"Error: .*{message}")


def test_each_host_counts_its_processes(jobs: list[LaunchJob], monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("--nproc_per_node", "auto", "train.py", "--n", "6").exit_code == 0
    order = jobs[0].order(0, remote=False, capture=False)
    assert order["nproc"] == "auto"
    gpus = 3
    monkeypatch.setattr(node_agent, "count_gpus", lambda environment: gpus)
    assert [node_agent.processes_here({**order, "nproc": word}) for word in (5, "auto", "gpu")] == [5, 3, 3]
    assert node_agent.processes_here({**order, "nproc": "cpu"}) == len(os.sched_getaffinity(0))
    gpus = 0
    assert node_agent.processes_here(order) == 1
    with pytest.raises(node_agent.Refusal, match=r"gpu: there is no GPU here .* use auto, cpu or a number"):
        node_agent.processes_here({**order, "nproc": "gpu"})


def test_gpus_are_counted_with_the_environment_of_the_ranks() -> None:
    assert node_agent.count_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == 0
    with pytest.raises(node_agent.Refusal, match=r"could not be counted: .*give --nproc_per_node a number"):
        node_agent.count_gpus({**os.environ, "PYTHONHOME": "/nowhere"})


def test_number_of_processes_is_missing() -> None:
    assert "--nproc_per_node did not receive any value: say how many" in refused("train.py")
    late = refused("train.py", "--nproc_per_node", "2")
    assert "options must come before the script" in late


def test_script_is_missing() -> None:
    assert "Missing argument 'USER_SCRIPT'" in refused("--nproc_per_node", "2")


def test_launch_args() -> None:
    given = parse_launch_args("max_restarts=1, no_python,role=a=b")
    assert given.arguments == ("--max_restarts=1", "--no_python", "--role=a=b")
    assert not given.runs_a_script
    assert parse_launch_args("max_restarts=1").runs_a_script
    assert parse_launch_args(None).arguments == ()


def test_a_module(jobs: list[LaunchJob]) -> None:
    assert invoke("--nproc_per_node", "2", "-m", "package.train", "-m", "x", "--n", "6").exit_code == 0
    order = jobs[0].order(0, remote=False, capture=False)
    assert order["command"] == ["package.train", "-m", "x", "--n", "6"]
    assert order["script"] is None, "no file has to be there"
    assert order["torchrun_options"][-1] == "--module"


def test_restarts(jobs: list[LaunchJob]) -> None:
    for option, expected in (("--max-restarts=3", 3), ("--extra_launch_args=max_restarts=2", 2)):
        assert invoke("--nproc_per_node", "2", option, "train.py").exit_code == 0
        assert jobs[-1].order(0, remote=False, capture=False)["max_restarts"] == expected
    assert "--max_restarts=3" in jobs[0].torchrun_options(0)


def test_master_first() -> None:
    assert master_first(["a"], "127.0.0.1") == ["a"]
    assert master_first(["a", "b", "c"], "10.0.0.1") == ["a", "b", "c"]
    with pytest.raises(ClickException, match="cannot be localhost"):
        master_first(["a", "b"], "::1")


def test_which_hosts_need_ssh() -> None:
    assert is_this_machine("localhost")
    assert not is_this_machine("127.0.0.2")


def test_environment_for_other_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    stays = {
        "SSH_AUTH_SOCK": "x",
        "SLURM_PROCID": "1",
        "DISPLAY": ":0",
        "HOME": "/root",
        "RANK": "3",
        "_": "/bin/env",
    }
    travels = {
        "PATH": "/a:/b",
        "WANDB_API_KEY": "it's secret",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HOMEPAGE": "x",
    }
    result = portable_environment({**stays, **travels, "PYTHONPATH": "src:/opt/lib:"})
    assert result == {**travels, "PYTHONPATH": f"{tmp_path}/src:/opt/lib:{tmp_path}"}


def test_stop_timeout() -> None:
    assert stop_timeout({}) == 15.0
    assert stop_timeout({"COLOSSALAI_STOP_TIMEOUT": "0.5"}) == 0.5
    for text in ("soon", "-1"):
        with pytest.raises(ClickException, match=f"COLOSSALAI_STOP_TIMEOUT must be a number .* got '{text}'"):
            stop_timeout({"COLOSSALAI_STOP_TIMEOUT": text})


def test_help_shows_examples() -> None:
    text = CliRunner().invoke(cli, ["run", "-h"]).output
    for part in (
        "colossalai run --nproc_per_node 2 train.py",
        "--hostfile hosts.txt",
        "COLOSSALAI_SSH_OPTIONS",
    ):
        assert part in text
    assert "check" in CliRunner().invoke(cli, ["--help"]).output
