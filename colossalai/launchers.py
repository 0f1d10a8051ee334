"""``launch`` and its forms for torchrun, SLURM and OpenMPI: from a bare process to a rank with its groups.

Everything that can be wrong with the arguments, the environment or the config is refused first, on this rank
alone, before a connection is opened.
"""

from __future__ import annotations

import argparse
import atexit
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossalai.context import Config
from colossalai.context.backend import default_backend
from colossalai.context.parallel_context import refuse_second_launch
from colossalai.context.rendezvous import read_seconds
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.utils.watchdog import Watchdog

ConfigLike = Config | Mapping[str, Any] | str | Path | None

# launcher -> what it tells us, and in which environment variable
WATCHDOG_VARIABLE = "COLOSSALAI_WATCHDOG_TIMEOUT"
_watchdogs: list[Watchdog] = []  # of this job: one, or none

_TORCHRUN = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "host": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
_SLURM = {"rank": "SLURM_PROCID", "world_size": "SLURM_NPROCS"}
_OPENMPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
}


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with the arguments of ``launch``; add your own with ``parser.add_argument``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the config file (.py or .json)")
    parser.add_argument("--host", type=str, help="name or address of the machine where rank 0 runs")
    parser.add_argument("--port", type=int, help="a free port on that machine, the same for all ranks")
    parser.add_argument("--world_size", type=int, help="number of processes in the job")
    parser.add_argument("--rank", type=int, help="number of this process, from 0")
    parser.add_argument(
        "--local_rank",
        "--local-rank",  # as `python -m torch.distributed.launch` writes it
        type=int,
        help="number of this process on its machine; derived if left out",
    )
    parser.add_argument(
        "--backend", type=str, default=default_backend(), help="nccl or gloo; default here: %(default)s"
    )
    return parser


def launch(
    config: ConfigLike,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Join the job as ``rank`` of ``world_size`` and make the process groups that ``config`` asks for.

    ``config`` is a dict, a ``Config``, the path of a ``.py`` or ``.json`` file, or None.  ``backend`` is NCCL
    with CUDA and gloo without, unless given.  ``local_rank`` is derived from the machine's other ranks when
    left out.  ``verbose`` logs what was set up: rank 0 as INFO, the others as DEBUG
    (``get_dist_logger().set_level("DEBUG")`` before the launch shows all ranks).
    """
    refuse_second_launch()
    _check_arguments(rank=rank, world_size=world_size, host=host, port=port, local_rank=local_rank, seed=seed)
    patience = read_seconds(WATCHDOG_VARIABLE) if os.environ.get(WATCHDOG_VARIABLE) else None
    try:
        gpc.verbose = verbose
        gpc.load_config(config)
        gpc.init_global_dist(rank, world_size, backend, host, port)
        gpc.detect_num_processes_on_current_node()
        gpc.set_device(local_rank)
        gpc.init_parallel_groups()
        gpc.set_seed(seed)
    except Exception:
        gpc.destroy()  # so that the process can correct the cause and launch again
        raise
    atexit.unregister(_let_gloo_finish)  # of an earlier launch
    atexit.register(_let_gloo_finish)
    if patience is not None:
        _watch(patience)
    if verbose:
        get_dist_logger().info(
            f"Distributed environment is initialized, data parallel size: {gpc.data_parallel_size}, pipeline"
            f" parallel size: {gpc.pipeline_parallel_size}, tensor parallel size: {gpc.tensor_parallel_size}",
            ranks=[0],
        )


def _watch(seconds: float) -> None:
    """Report where all ranks are whenever one has not moved for ``seconds``, until the process ends."""
    while _watchdogs:  # of an earlier launch
        _watchdogs.pop().stop()
    _watchdogs.append(Watchdog(timeout=seconds))
    _watchdogs[0].start()
    atexit.register(_watchdogs[0].stop)


def launch_from_torch(
    config: ConfigLike = None, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """``launch`` with what torchrun (or ``colossalai run``) says in the environment."""
    found = _read_environment("torchrun or colossalai run", _TORCHRUN)
    launch(config, backend=backend, seed=seed, verbose=verbose, **found)


def launch_from_slurm(
    config: ConfigLike,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """``launch`` with the rank and world size that srun says in the environment."""
    found = _read_environment("srun", _SLURM)
    launch(config, host=host, port=port, backend=backend, seed=seed, verbose=verbose, **found)


def launch_from_openmpi(
    config: ConfigLike,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """``launch`` with the ranks and world size that mpirun says in the environment."""
    found = _read_environment("mpirun of OpenMPI", _OPENMPI)
    launch(config, host=host, port=port, backend=backend, seed=seed, verbose=verbose, **found)


def _let_gloo_finish() -> None:
    """Give gloo's threads the interpreter once more before it ends.

    A thread of gloo may still hold the last collective, and with it a Python object of the backward pass.  If
    it lets go of it while the interpreter shuts down, torch aborts the process (SIGABRT) at the end of a
    successful script.
    """
    time.sleep(0.1)


def _read_environment(launcher: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """The arguments in ``variables``; all that are missing are named in one error."""
    missing = [variable for variable in variables.values() if not os.environ.get(variable)]
    if missing:
        raise RuntimeError(
            f"the environment variables {', '.join(missing)} are not set; they come from {launcher}: start"
            " the script with it, or call colossalai.launch with explicit arguments"
        )
    found: dict[str, Any] = {}
    for argument, variable in variables.items():
        text = os.environ[variable]
        try:
            found[argument] = text if argument == "host" else int(text)
        except ValueError:
            raise RuntimeError(
                f"the environment variable {variable} must be an integer, got {text!r}"
            ) from None
    return found


def _check_arguments(**given: Any) -> None:
    """Refuse what is missing, of a wrong type or out of range."""
    required = ("rank", "world_size", "host", "port")
    if missing := [name for name in required if given[name] is None]:
        raise ValueError(
            f"launch needs {', '.join(missing)}; on the command line:"
            f" {' '.join(f'--{name} ...' for name in missing)}. Under torchrun call launch_from_torch instead"
        )
    for name, value in given.items():
        kind = str if name == "host" else int
        if name == "local_rank" and value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(
                f"launch argument {name} must be of type {kind.__name__}, got {type(value).__name__}"
                f" {value!r}"
            )
    bounds = {
        "world_size": (1, None),
        "rank": (0, given["world_size"]),
        "local_rank": (0, given["world_size"]),
        "port": (1, 2**16),
        "seed": (0, 2**32),
    }
    for name, (low, end) in bounds.items():
        value = given[name]
        if value is not None and (value < low or (end is not None and value >= end)):
            limit = f"from {low} to {end - 1}" if end is not None else f"at least {low}"
            raise ValueError(f"launch argument {name} must be {limit}, got {value}" + _hint(name, given))
    if not given["host"].strip("[] "):
        raise ValueError("launch argument host must name the machine where rank 0 runs, got an empty string")


def _hint(name: str, given: Mapping[str, Any]) -> str:
    return f" with world_size={given['world_size']}" if name in ("rank", "local_rank") else ""
