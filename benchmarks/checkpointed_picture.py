"""Draws the time of steps over their peaks, from what ``benchmarks.activation_checkpointing`` printed:

python -m benchmarks.checkpointed_picture LOG [LOG ...] -o docs/source/en/activation_checkpointing.png

Each case is one panel; of a case that was run several times, the last run counts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

OURS = "auto_checkpoint"
Points = dict[str, list[tuple[float, float]]]


def read(paths: Iterable[Path]) -> dict[str, Points]:
    """The peaks in GiB and the milliseconds of each case by side."""
    found: dict[str, Points] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            if " built in " in line:
                found[line.split(" built in ")[0].strip()] = {}
                continue
            match = re.match(r"(\S+ x \d+) +(auto_checkpoint|all blocks full|Chen, \d+ segments) +(.*)", line)
            if match is None or match[1] not in found:
                continue
            numbers = [float(number) for number in re.findall(r"\d+\.\d+", match[3])]
            is_ours = match[2] == OURS  # a budget stands before what was measured
            points = found[match[1]].setdefault(match[2].split(",")[0], [])
            points.append((numbers[is_ours], numbers[is_ours + 1]))
    return {case: points for case, points in found.items() if OURS in points}


def draw(cases: dict[str, Points], path: str) -> None:
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows))
    for number, (case, points) in enumerate(cases.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.step(*zip(*sorted(points[OURS]), strict=True), "-o", where="post", markersize=4, label=OURS)
        for side, mark in (("all blocks full", "s"), ("Chen", "^")):
            if side in points:
                axes.plot(*zip(*points[side], strict=True), mark, markersize=8, label=side)
        axes.set_title(case, fontsize=10)
        axes.set_xlabel("peak (GiB)")
        axes.set_ylabel("step (ms)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", default="activation_checkpointing.png")
    parser.add_argument("--cases", nargs="+", help='such as "gpt2 x 16"; by default, all')
    args = parser.parse_args()
    cases = read(args.logs)
    if missing := [case for case in args.cases or () if case not in cases]:
        parser.error(f"no row of {missing[0]!r}; there are {', '.join(cases)}")
    draw({case: cases[case] for case in args.cases or cases}, args.output)


if __name__ == "__main__":
    main()
