"""What ``launch`` refuses: on this rank alone, so no other rank exists in these tests and nothing may wait
for one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.context import Config, ConfigException, RendezvousError
from colossalai.core import global_context as gpc

GOOD = {"config": {}, "rank": 0, "world_size": 2, "host": "localhost", "port": 29500}


@pytest.fixture(autouse=True)
def _no_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(self: Any) -> None:
        raise AssertionError("the arguments were accepted")

    monkeypatch.setattr("colossalai.context.rendezvous.Rendezvous.meet", meet)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"rank": None, "port": None},
            ValueError,
            "launch needs rank, port; on the command line: --rank ... --port ...",
        ),
        ({"rank": "0"}, TypeError, "argument rank must be of type int, got str '0'"),
        ({"rank": False}, TypeError, "argument rank must be of type int, got bool False"),
        ({"world_size": 2.0}, TypeError, "argument world_size must be of type int, got float 2.0"),
        ({"host": 7}, TypeError, "argument host must be of type str, got int 7"),
        ({"seed": "1"}, TypeError, "argument seed must be of type int, got str '1'"),
        ({"seed": None}, TypeError, "argument seed must be of type int, got NoneType None"),
        ({"rank": 2}, ValueError, "argument rank must be from 0 to 1, got 2 with world_size=2"),
        ({"rank": -1}, ValueError, "argument rank must be from 0 to 1, got -1 with world_size=2"),
        ({"local_rank": 2}, ValueError, "argument local_rank must be from 0 to 1, got 2 with world_size=2"),
        ({"world_size": 0}, ValueError, "argument world_size must be at least 1, got 0"),
        ({"port": 0}, ValueError, "argument port must be from 1 to 65535, got 0"),
        ({"port": 65536}, ValueError, "argument port must be from 1 to 65535, got 65536"),
        ({"seed": -1}, ValueError, "argument seed must be from 0 to 4294967295, got -1"),
        (
            {"host": ""},
            ValueError,
            "argument host must name the machine where rank 0 runs, got an empty string",
        ),
        (
            {"backend": "nlcc"},
            ValueError,
            "torch has no backend 'nlcc' here; use 'gloo' or, with CUDA, 'nccl'",
        ),
        ({"backend": 1}, TypeError, "backend must be 'nccl', 'gloo' or None, got int 1"),
        ({"config": "nowhere.py"}, FileNotFoundError, r"no config file 'nowhere\.py' \(looked for /"),
        ({"config": 3}, ConfigException, "config must be a dict, .* got int: 3"),
        ({"config": {"paralel": {}}}, ConfigException, "did you mean 'parallel'"),  # codespell:ignore
        ({"config": {"parallel": {"tensor": 2}}}, ConfigException, "has size 2 but no mode"),
        (
            {"config": {"parallel": {"pipeline": 4}}},
            ConfigException,
            "2 is not a multiple of pipeline 4 x tensor 1 = 4",
        ),
        ({"config": {"parallel": {"data": 1}}}, ConfigException, "= 1, but the world size is 2"),
    ],
)
def test_refused_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        colossalai.launch(**{**GOOD, **wrong})
    assert gpc.config == {}
    assert not dist.is_initialized()


def test_the_arguments_above_are_otherwise_good() -> None:
    with pytest.raises(AssertionError, match="the arguments were accepted"):
        colossalai.launch(**GOOD)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cpu:gloo,cuda:nccl"])
def test_nccl_without_cuda_says_what_to_use(backend: str) -> None:
    with pytest.raises(RuntimeError, match=f"backend '{backend}' needs CUDA, .*; use backend='gloo'"):
        colossalai.launch(**GOOD, backend=backend)


def test_a_wrong_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOSSALAI_RENDEZVOUS_TIMEOUT", "long")
    with pytest.raises(
        ValueError, match="COLOSSALAI_RENDEZVOUS_TIMEOUT must be a positive number of seconds"
    ):
        colossalai.launch(**GOOD)


ENVIRONMENTS = {
    "torch": {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    },
    "slurm": {"SLURM_PROCID": "1", "SLURM_NPROCS": "2"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
}
ORIGIN = {"torch": "torchrun or colossalai run", "slurm": "srun", "openmpi": "mpirun of OpenMPI"}


def _launch_from(launcher: str, **kwargs: Any) -> None:
    where = {} if launcher == "torch" else {"host": "localhost", "port": 29500}
    getattr(colossalai, f"launch_from_{launcher}")(config={}, **where, **kwargs)


@pytest.fixture(params=list(ENVIRONMENTS))
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, variables in ENVIRONMENTS.items():
        for variable, value in variables.items():
            monkeypatch.delenv(variable, raising=False)
            if name == request.param:
                monkeypatch.setenv(variable, value)
    return str(request.param)


def test_a_launcher_is_read_from_its_environment(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("colossalai.launchers.launch", lambda config, **kwargs: seen.update(kwargs))
    _launch_from(launcher, seed=7, verbose=False, backend="gloo")
    given = {"seed": 7, "verbose": False, "backend": "gloo"}
    found = {"rank": 1, "world_size": 2, "host": "localhost", "port": 29500}
    local = {} if launcher == "slurm" else {"local_rank": 1}
    assert seen == given | found | local


def test_all_missing_variables_are_named_with_their_launcher(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(ENVIRONMENTS[launcher])
    monkeypatch.delenv(names[0])
    monkeypatch.setenv(names[-1], "")
    with pytest.raises(
        RuntimeError,
        match=f"variables {names[0]}, {names[-1]} are not set; they come from {ORIGIN[launcher]}: start"
        " the script",
    ):
        _launch_from(launcher)


def test_a_variable_that_is_no_number_is_named(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(ENVIRONMENTS[launcher]))
    monkeypatch.setenv(name, "one")
    with pytest.raises(RuntimeError, match=f"variable {name} must be an integer, got 'one'"):
        _launch_from(launcher)


def test_the_parser_has_the_documented_arguments() -> None:
    parser = colossalai.get_default_parser()
    parser.add_argument("--from_torch", action="store_true")
    text = "--config c.py --host node0 --port 29500 --world_size 4 --rank 3 --local_rank 1 --from_torch"
    args = parser.parse_args(text.split())
    assert (args.config, args.host, args.port, args.world_size) == ("c.py", "node0", 29500, 4)
    assert (args.rank, args.local_rank, args.from_torch) == (3, 1, True)
    assert args.backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert parser.parse_args(["--backend", "gloo"]).backend == "gloo"
    assert parser.parse_args(["--local-rank=2"]).local_rank == 2  # how torch.distributed.launch writes it


def test_a_path_may_be_a_string_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("parallel = dict(pipeline=3)\n")
    for path in (tmp_path / "config.py", str(tmp_path / "config.py")):
        with pytest.raises(ConfigException, match="2 is not a multiple of pipeline 3"):
            colossalai.launch(**{**GOOD, "config": path})
    with pytest.raises(ConfigException, match="2 is not a multiple of pipeline 3"):
        colossalai.launch(**{**GOOD, "config": Config(parallel={"pipeline": 3})})


def test_the_error_of_the_meeting_is_a_runtime_error() -> None:
    assert issubclass(RendezvousError, RuntimeError)
    assert issubclass(ConfigException, ValueError)
