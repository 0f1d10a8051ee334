"""A dry run as a table for people: one row for all ranks that need the same."""

from __future__ import annotations

from collections.abc import Sequence

from colossalai.dry_run.job import RankReport
from colossalai.dry_run.watch import MemoryEstimate

MIB = 2**20


def format_reports(reports: Sequence[RankReport]) -> str:
    """Ranks, million parameters, MiB of each part, and the moment of the peak."""
    names = [name for name in reports[0].memory.parts if any(r.memory.parts[name] for r in reports)]
    host = any(r.memory.host for r in reports)
    head = ["ranks", "parameters", *names, "peak MiB", "at", *(["host MiB"] if host else [])]
    rows = [head, *(_row(group, names, host) for group in _groups(reports))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _groups(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Equal ranks, in the order of the first of each group."""
    groups: dict[tuple[int, MemoryEstimate], list[RankReport]] = {}
    for report in reports:
        groups.setdefault((report.parameters, report.memory), []).append(report)
    return list(groups.values())


def _row(group: Sequence[RankReport], names: Sequence[str], host: bool) -> list[str]:
    memory = group[0].memory
    return [
        _ranges([r.rank for r in group]),
        f"{group[0].parameters / 10**6:,.1f}M",
        *(mib(memory.parts[name]) for name in names),
        mib(memory.peak),
        memory.moment,
        *([mib(memory.host)] if host else []),
    ]


def mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}"


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3 and 8."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
