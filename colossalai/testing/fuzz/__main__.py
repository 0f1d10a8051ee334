"""``python -m colossalai.testing.fuzz``: random cases until the time is over; the exit code says whether one
failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from colossalai.testing.fuzz.cases import Case, random_case
from colossalai.testing.fuzz.runner import RANKS, fuzz, seeded_cases
from colossalai.testing.fuzz.script import script_text


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.script:
        print(script_text(_one(options.case, options.ranks)))
        return 0
    cases: Iterable[Case]
    if options.case is not None:
        cases = [_one(options.case, options.ranks)]
    else:
        cases = seeded_cases(options.seed, options.cases, options.ranks)
    summary = fuzz(
        cases,
        minutes=options.minutes if options.cases is None and options.case is None else None,
        limit=options.limit,
        shrink_seconds=options.shrink,
        most_failures=options.failures,
        out=sys.stdout,
        folder=options.out,
    )
    print(summary.text())
    return 1 if summary.failed else 0


def _one(text: str, ranks: list[int]) -> Case:
    """A case as JSON, as a file of it, or as SEED:INDEX."""
    if text.lstrip().startswith("{"):
        return Case.from_json(text)
    if Path(text).is_file():
        return Case.from_json(Path(text).read_text())
    seed, _, index = text.partition(":")
    return random_case(int(seed), int(index), ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m colossalai.testing.fuzz",
        description="Train random models under random plans with random habits, reload them under other"
        " plans, and compare everything with plain PyTorch.  A failure is made smaller and printed as a"
        " script.",
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="stop after this many minutes (default: 2)"
    )
    parser.add_argument("--cases", type=int, help="run this many cases, whatever time they take")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default: 0)")
    parser.add_argument("--case", help="one case: SEED:INDEX, JSON, or a file with it")
    parser.add_argument("--script", action="store_true", help="print the script of --case and do not run it")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(RANKS),
        help="numbers of ranks to draw from, such as 1,2,4",
    )
    parser.add_argument(
        "--limit", type=float, default=20.0, help="seconds without any work until a run counts as a hang"
    )
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make a failure smaller")
    parser.add_argument("--failures", type=int, default=5, help="stop after this many failures")
    parser.add_argument("--out", type=Path, help="a folder for the scripts of failures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
