"""``colossalai check``: prints what ``installation.py`` finds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from colossalai.cli.installation import Row, Section

_MARKS = {True: "\u2713", False: "x", None: "N/A"}
_PLAIN_MARKS = {True: "OK", False: "x", None: "N/A"}  # for a terminal that cannot print a check mark


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-i",
    "--installation",
    is_flag=True,
    expose_value=False,  # there is only one report so far
    help="Report on the installation (the default).",
)
def check() -> None:
    """Show what is installed here, whether it fits together, and how to get what is missing.

    The exit code is 1 if something under "Compatibility" does not fit.
    """
    from colossalai.cli.installation import (
        inspect_installation,
    )  # imports torch, which `run` need not wait for

    sections = inspect_installation()
    print(render(sections, sys.stdout.encoding or "ascii"))
    fits = all(row.value is not False for section in sections if section.decisive for row in section.rows)
    sys.exit(0 if fits else 1)


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
