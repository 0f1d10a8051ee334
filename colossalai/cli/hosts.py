"""The hosts of a job in their order: node rank 0 comes first."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from click import ClickException

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[^\s,#-][^\s,#]*")  # a leading dash would reach ssh as an option


def choose_hosts(
    *,
    host: str | None,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    num_nodes: int,
) -> list[str]:
    """The hosts of the job, in the order given; empty for this machine alone."""
    if include is not None and exclude is not None:
        raise ClickException("--include and --exclude are mutually exclusive, only one can be used")
    if host is not None and hostfile is not None:
        raise ClickException("--host and --hostfile are mutually exclusive, only one can be used")
    if hostfile is None and (include is not None or exclude is not None):
        option = "--include" if include is not None else "--exclude"
        raise ClickException(f"{option} selects from a hostfile, and no --hostfile was given")
    if hostfile is not None:
        hosts = _filter(read_hostfile(hostfile), include, exclude)
    else:
        hosts = _split("--host", host) if host is not None else []
    return _limit(hosts, num_nodes)


def read_hostfile(path: str) -> list[str]:
    """One host per line; ``#`` starts a comment, blank lines are skipped."""
    if not Path(path).is_file():
        raise ClickException(f"Unable to find the hostfile, no such file: {path}")
    hosts: list[str] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        host = line.split("#")[0].strip()
        if not host:
            continue
        if not _HOST.fullmatch(host):
            raise ClickException(f"line {number} of {path} must be one host name, got {host!r}")
        if host in hosts:
            raise ClickException(f"found duplicate host {host} in the hostfile {path}, line {number}")
        hosts.append(host)
    if not hosts:
        raise ClickException(f"the hostfile {path} names no host; write one host name per line")
    return hosts


def _split(option: str, text: str) -> list[str]:
    hosts = [part.strip() for part in text.split(",")]
    for position, host in enumerate(hosts):
        if not _HOST.fullmatch(host):
            raise ClickException(f"{option} takes host names separated by commas, got {text!r}")
        if host in hosts[:position]:
            raise ClickException(f"found duplicate host {host} in {option} {text}")
    return hosts


def _filter(hosts: list[str], include: str | None, exclude: str | None) -> list[str]:
    if include is None and exclude is None:
        return hosts
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    named = _split(option, text or "")
    for name in named:
        if name not in hosts:
            raise ClickException(
                f"Hostname '{name}' not found in hostfile ({option}); it has {', '.join(hosts)}"
            )
    left = [host for host in hosts if (host in named) == (include is not None)]
    if not left:
        raise ClickException(f"--exclude {text} leaves no host of the hostfile")
    return left


def _limit(hosts: list[str], num_nodes: int) -> list[str]:
    if num_nodes == -1:
        return hosts
    if num_nodes < 1:
        raise ClickException(f"--num_nodes must be at least 1 (or -1 for all hosts), got {num_nodes}")
    available = len(hosts) or 1
    if num_nodes > available:
        raise ClickException(
            f"--num_nodes {num_nodes} asks for more hosts than the {available} given; add hosts with --host"
            " or --hostfile"
        )
    return hosts[:num_nodes]


def master_first(hosts: Sequence[str], master_addr: str) -> list[str]:
    """The node that hosts the rendezvous has node rank 0, so the host named as master moves to the front."""
    if len(hosts) > 1 and master_addr in _LOOPBACK:
        raise ClickException(
            f"master_addr cannot be localhost when running on multiple nodes (got {master_addr}): "
            f"give the name or address of one of them, for example --master_addr {hosts[0]}"
        )
    if master_addr in hosts:
        return [master_addr, *(host for host in hosts if host != master_addr)]
    return list(hosts)


def is_this_machine(host: str) -> bool:
    """Whether the host needs no ssh.

    Other names of this machine work too, through ssh (no slow look-ups here).
    """
    return host in (*_LOOPBACK, socket.gethostname())
