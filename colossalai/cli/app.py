"""The group of commands."""

from __future__ import annotations

import click

from colossalai._version import __version__
from colossalai.cli.benchmark.command import benchmark
from colossalai.cli.check import check
from colossalai.cli.ckpt import ckpt
from colossalai.cli.generate import generate
from colossalai.cli.run import run
from colossalai.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="colossalai")
def cli() -> None:
    """Train and serve large neural networks on one machine or many.

    \b
    Start here:
      colossalai check -i                          what this machine offers
      colossalai run --nproc_per_node 2 train.py   two processes on this machine
      colossalai benchmark --gpus 4                which tensor-parallel mode is fastest here
      colossalai ckpt show checkpoints             what is in a checkpoint
      colossalai generate MODEL --prompt "Once"    a language model writes
      colossalai serve my-model                    an HTTP endpoint, and a page to try it
    """


cli.add_command(run)
cli.add_command(check)
cli.add_command(benchmark)
cli.add_command(ckpt)
cli.add_command(generate)
cli.add_command(serve)
