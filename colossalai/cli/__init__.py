"""The ``colossalai`` command: ``run`` starts a distributed job, ``check`` looks at the installation,
``benchmark`` compares tensor-parallel modes.

How ``colossalai run`` works, from the outside in:

    launcher (launcher.py, the user's terminal)
      one node agent per host (node_agent.py; started locally or by ssh)
        torchrun (_torchrun.py)
          ranks (_rank.py, which runs the user's script)

The launcher talks to each agent over two pipes (wire.py): orders go down, output and reports come up.  A
process that loses the one above it ends everything below it, so nothing outlives the launcher, however it
died.
"""

from __future__ import annotations


def main(prog_name: str = "colossalai") -> None:
    """The console script ``colossalai``."""
    from colossalai.cli.app import cli

    cli(prog_name=prog_name)
