"""The job to launch: the checked options of the user, and the order for each node."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from click import ClickException

STOP_TIMEOUT = "COLOSSALAI_STOP_TIMEOUT"
DEFAULT_STOP_TIMEOUT = 15.0
COUNTED = ("auto", "gpu", "cpu")  # --nproc_per_node in words (see node_agent.processes_here)

# what torchrun must hear from us alone, and how our user says it
_OURS = {
    "nnodes": "--num_nodes",
    "nproc_per_node": "--nproc_per_node",
    "node_rank": "the order of the hosts",
    "master_addr": "--master_addr",
    "master_port": "--master_port",
    "rdzv_backend": "--master_addr and --master_port",
    "rdzv_endpoint": "--master_addr and --master_port",
    "standalone": "--master_addr and --master_port",
}

# these describe one machine or one login, or another launcher's ranks: another host has its own
_STAYS_HERE = re.compile(
    r"SSH_.*|SLURM.*|SBATCH_.*|PMI.*|OMPI_.*|PRTE_.*|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*|DBUS_.*|DESKTOP_.*"
    r"|HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|MAIL|HOSTNAME|HOST|TERM.*|TTY|TMUX.*|STY|WINDOWID|LS_COLORS|_"
    r"|TMPDIR|BASH.*|LESS.*|INVOCATION_ID|JOURNAL_STREAM|COLOSSALAI_SSH_OPTIONS"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_.*|GROUP_WORLD_SIZE"
    r"|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_.*"
)


@dataclass(frozen=True, kw_only=True)
class LaunchArgs:
    """Further options of the user for torchrun."""

    arguments: tuple[str, ...] = ()
    runs_a_script: bool = True
    """False when the name after the options is a module or a program, which no file must match."""
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """One distributed run."""

    hosts: tuple[str, ...]
    nproc_per_node: int | str
    """A number, or a word of ``COUNTED``: each host counts what it has."""
    master_addr: str
    master_port: int
    script: str
    script_args: tuple[str, ...] = ()
    launch_args: LaunchArgs = LaunchArgs()
    ssh_port: int | None = None
    stop_timeout: float = DEFAULT_STOP_TIMEOUT
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.max_restarts and self.launch_args.max_restarts:
            raise ClickException(
                "--max_restarts and max_restarts in --extra_launch_args say the same; use one of them"
            )

    def order(self, node_rank: int, *, remote: bool, capture: bool) -> dict[str, Any]:
        """What the agent of this node is told (see ``node_agent``)."""
        return {
            "torchrun_options": self.torchrun_options(node_rank),
            "command": [self.script, *self.script_args],
            "script": self.script if self.launch_args.runs_a_script else None,
            "cwd": os.getcwd(),
            "env": portable_environment(os.environ) if remote else None,
            "capture": capture,
            "nproc": self.nproc_per_node,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "is_master": node_rank == 0,
            "stop_timeout": self.stop_timeout,
            "max_restarts": self.max_restarts or self.launch_args.max_restarts,
        }

    def torchrun_options(self, node_rank: int) -> list[str]:
        # [Note: static rendezvous] torchrun's other rendezvous, c10d, numbers nodes by their own host names
        # and decides by name lookups who hosts the store: ranks would not follow the order of the hosts, and
        # two loopback addresses of one machine would both want to be the host.  The static one takes our
        # numbers. What it lacks, nodes that come and go during a run, a fixed list of hosts does not need.
        return [
            f"--nnodes={len(self.hosts) or 1}",
            f"--node_rank={node_rank}",
            "--rdzv_backend=static",
            f"--master_addr={self.master_addr}",
            f"--master_port={self.master_port}",
            *([f"--max_restarts={self.max_restarts}"] if self.max_restarts else []),
            *self.launch_args.arguments,
        ]


def parse_launch_args(text: str | None, *, as_module: bool = False) -> LaunchArgs:
    """``a=1,b`` becomes ``--a=1 --b``, checked by the parser of torchrun itself; ``as_module`` adds
    ``--module``.
    """
    if not text and not as_module:
        return LaunchArgs()
    items = [item.strip() for item in text.split(",")] if text else []
    for item in items:
        if not re.fullmatch(r"[A-Za-z][\w-]*(=.*)?", item):
            raise ClickException(
                "--extra_launch_args takes torchrun options as name=value or name, separated by commas, got"
                f" {text!r}"
            )
    arguments = tuple(f"--{item}" for item in (*items, *(["module"] if as_module else [])))
    untouched, options = _torchrun_options([]), _torchrun_options(arguments)
    for name, instead in _OURS.items():
        if getattr(options, name) != getattr(untouched, name):
            raise ClickException(f"--extra_launch_args cannot set {name}: use {instead} of colossalai run")
    return LaunchArgs(
        arguments=arguments,
        runs_a_script=not (options.module or options.no_python),
        max_restarts=options.max_restarts,
    )


def _torchrun_options(arguments: Iterable[str]) -> Namespace:
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ClickException(f"torchrun refuses --extra_launch_args: {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args([*arguments, "script.py"])


def portable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What another host should know; relative entries of ``PYTHONPATH`` are made absolute."""
    kept = {name: value for name, value in environment.items() if not _STAYS_HERE.fullmatch(name)}
    if "PYTHONPATH" in kept:
        entries = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)
    return kept


def stop_timeout(environment: Mapping[str, str]) -> float:
    """How long ranks may take to end once they are told to, before they are killed."""
    text = environment.get(STOP_TIMEOUT, str(DEFAULT_STOP_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ClickException(f"{STOP_TIMEOUT} must be a number of seconds, at least 0, got {text!r}")
    return seconds
