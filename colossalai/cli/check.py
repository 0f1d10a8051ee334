"""``colossalai check``: prints what ``installation.py`` and ``bandwidth.py`` find."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from colossalai.cli.installation import Row, Section

_MARKS = {True: "\u2713", False: "x", None: "N/A"}
_PLAIN_MARKS = {True: "OK", False: "x", None: "N/A"}  # for a terminal that cannot print a check mark


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-i", "--installation", is_flag=True, help="Report on the installation (the default).")
@click.option(
    "--bandwidth",
    is_flag=True,
    help="Measure latency and bandwidth of this machine's or job's links.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    help="With --bandwidth: processes to start.  [default: one for each GPU, or 2 on a CPU]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    help="With --bandwidth: what is measured; auto, the default, takes the GPUs where there are several.",
)
def check(installation: bool, bandwidth: bool, ranks: int | None, device: str | None) -> None:
    """Show what is installed here, whether it fits together, and how to get what is missing.

    The exit code is 1 if something under "Compatibility" does not fit.

    \b
    colossalai check --bandwidth                           the links of this machine
    colossalai run --nproc_per_node 8 --hostfile hosts.txt \\
        -m colossalai check --bandwidth                    the links of a job
    """
    if not bandwidth and (ranks is not None or device is not None):
        raise click.UsageError("--ranks and --device belong to --bandwidth")
    fits = True
    if installation or not bandwidth:
        fits = _check_installation()
    if bandwidth:
        from colossalai.cli.bandwidth import check_bandwidth

        check_bandwidth(ranks, device or "auto")
    sys.exit(0 if fits else 1)


def _check_installation() -> bool:
    from colossalai.cli.installation import (
        inspect_installation,
    )  # imports torch, which `run` need not wait for

    sections = inspect_installation()
    print(render(sections, sys.stdout.encoding or "ascii"))
    return all(row.value is not False for section in sections if section.decisive for row in section.rows)


def render(sections: list[Section], encoding: str) -> str:
    lines = ["#### Installation Report ####"]
    for section in sections:
        lines += ["", f"------------ {section.title} ------------"]
        lines += [_render_row(row, _marks(encoding)) for row in section.rows]
        lines += [f"Note: {note}" for note in section.notes]
    return "\n".join(lines).encode(encoding, errors="replace").decode(encoding)


def _marks(encoding: str) -> dict[bool | None, str]:
    try:
        _MARKS[True].encode(encoding)
    except UnicodeEncodeError:
        return _PLAIN_MARKS
    return _MARKS


def _render_row(row: Row, marks: dict[bool | None, str]) -> str:
    value = row.value if isinstance(row.value, str) else marks[row.value]
    return f"{row.label}: {value}" + (f" ({row.remark})" if row.remark else "")
