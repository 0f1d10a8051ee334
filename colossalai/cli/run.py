"""``colossalai run``: from the options to a job."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from colossalai.cli.hosts import choose_hosts, master_first
from colossalai.cli.job import COUNTED, LaunchJob, parse_launch_args, stop_timeout
from colossalai.cli.launcher import Launcher

_PORT = click.IntRange(1, 65535)


class _ProcessCount(click.IntRange):
    """A number of processes, or a word for what each host counts itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in COUNTED:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message} Give a number, or one of {', '.join(COUNTED)}.", param, ctx)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,  # what follows the script belongs to the script
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --nproc-per-node works too
    }
)
@click.option(
    "-H",
    "-host",
    "--host",
    metavar="HOSTS",
    help="Hosts to run on, separated by commas, in the order of their ranks. Default: this machine.",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    help="File with one host per line, in the order of their ranks; # starts a comment.",
)
@click.option("--include", metavar="HOSTS", help="Of the hostfile, use only these (separated by commas).")
@click.option("--exclude", metavar="HOSTS", help="Of the hostfile, leave these out (separated by commas).")
@click.option(
    "--num_nodes", type=int, default=-1, help="Use only the first N hosts. Default: -1, all of them."
)
@click.option(
    "--nproc_per_node",
    type=_ProcessCount(min=1),
    metavar="N|auto|gpu|cpu",
    help="Processes on each host. auto: one per GPU, or one process where there is no GPU; gpu: one per GPU, "
    "refused where there is none; cpu: one per core. Required.",
)
@click.option(
    "--master_addr",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where the processes meet: a name or address of the first host that all hosts can reach. "
    "Required with several hosts.",
)
@click.option(
    "--master_port",
    type=_PORT,
    default=29500,
    show_default=True,
    metavar="PORT",
    help="A port of that host which is free. Two jobs on one machine need different ports.",
)
@click.option("--ssh-port", type=_PORT, metavar="PORT", help="Port of the ssh servers. Default: ssh's own.")
@click.option(
    "--max_restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="If a process fails, start all of them again, up to N times. A script that begins with booster.load "
    "goes on.",
)
@click.option(
    "-m",
    "--module",
    "as_module",
    is_flag=True,
    help="USER_SCRIPT is the name of a module, as for python -m.",
)
@click.option(
    "--extra_launch_args",
    metavar="ARGS",
    help='More options for torchrun: "tee=3,redirects=3" becomes --tee=3 --redirects=3.',
)
@click.argument("user_script")
@click.argument("user_args", nargs=-1, type=click.UNPROCESSED)
def run(**options: object) -> None:
    """Run USER_SCRIPT with USER_ARGS in several processes, on this machine or on many.

    The script finds its rank with colossalai.launch_from_torch(config=...). All options come before the
    script; everything after it is passed on.

    \b
    One process per GPU of this machine, or one process without GPUs:
      colossalai run --nproc_per_node auto train.py --lr 0.1
    \b
    Two processes on this machine, with or without GPUs:
      colossalai run --nproc_per_node 2 train.py --lr 0.1
    \b
    A second job beside it needs another port:
      colossalai run --nproc_per_node 2 --master_port 29501 train.py
    \b
    Two hosts with four processes each (ranks 0-3 on host1, 4-7 on host2):
      colossalai run --nproc_per_node 4 --host host1,host2 --master_addr host1 train.py
    \b
    Many hosts, without a faulty one:
      colossalai run --nproc_per_node 8 --hostfile hosts.txt --exclude host7 --master_addr host1 train.py

    \b
    A long run that goes on from its last checkpoint when a process dies:
      colossalai run --nproc_per_node 8 --max-restarts 10 train.py

    \b
    Several hosts need:
      - ssh from here to each of them without a password (try: ssh host2 true);
      - the same Python, packages, script and working directory at the same paths.

    Environment variables are passed on to all hosts, except those that describe one machine or one login.
    Each line of output begins with its host. If a process fails, all are stopped, its traceback is shown once
    at the end, and its exit code becomes ours (128 + n for signal n). Ctrl-C stops all hosts; a second Ctrl-C
    kills at once.

    \b
    COLOSSALAI_SSH_OPTIONS   more options for ssh, for example "-i ~/.ssh/cluster_key"
    COLOSSALAI_STOP_TIMEOUT  seconds that processes get to end before they are killed (15)
    """
    sys.exit(Launcher(_job(**options)).run())  # type: ignore[arg-type]


def _job(
    *,
    host: str | None,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    num_nodes: int,
    nproc_per_node: int | str | None,
    master_addr: str,
    master_port: int,
    ssh_port: int | None,
    max_restarts: int,
    as_module: bool,
    extra_launch_args: str | None,
    user_script: str,
    user_args: tuple[str, ...],
) -> LaunchJob:
    if nproc_per_node is None:
        misplaced = any(arg.startswith(("--nproc_per_node", "--nproc-per-node")) for arg in user_args)
        remedy = (
            "options must come before the script"
            if misplaced
            else "say how many processes each host runs, or auto for one per GPU"
        )
        raise click.ClickException(
            f"--nproc_per_node did not receive any value: {remedy}, "
            f"for example colossalai run --nproc_per_node 2 {user_script}"
        )
    chosen = choose_hosts(host=host, hostfile=hostfile, include=include, exclude=exclude, num_nodes=num_nodes)
    return LaunchJob(
        hosts=tuple(master_first(chosen, master_addr)),
        nproc_per_node=nproc_per_node,
        master_addr=master_addr,
        master_port=master_port,
        script=user_script,
        script_args=user_args,
        launch_args=parse_launch_args(extra_launch_args, as_module=as_module),
        ssh_port=ssh_port,
        stop_timeout=stop_timeout(os.environ),
        max_restarts=max_restarts,
    )
