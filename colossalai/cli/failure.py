"""Failures of ranks: how each ended, which came first, and the text that tells the user."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# what a healthy rank says when another one has died, or has told it of its failure
_LOST_A_PEER = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket (closed|is closed|timeout)"
    r"|closed by peer"
    r"|DistNetworkError|DistStoreError|DistBackendError|ncclRemoteError|remote process exited"
    r"|PipelineError: pipeline stage",
    re.IGNORECASE,
)
_LINE = 78
_OTHERS = 8  # how many of those that failed after it are named


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank that did not end well.

    ``kind`` is ``raised`` (an uncaught exception), ``exit`` (``sys.exit``), ``died`` (a signal, or an exit
    that Python did not see), or ``stopped`` (by us, after another rank had failed).
    """

    rank: int
    local_rank: int
    exitcode: int
    kind: str
    summary: str
    time: float
    traceback: str = ""
    host: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code a shell would show: 128 + n for signal n."""
        return 128 - self.exitcode if self.exitcode < 0 else self.exitcode


@dataclass(frozen=True, kw_only=True)
class EarlyEnd:
    """One rank that ended with exit code 0 while others still ran."""

    rank: int
    local_rank: int
    seconds: float
    """From the start of its process to the end of its script."""
    time: float
    host: str = ""

    def __str__(self) -> str:
        where = f" (local rank {self.local_rank}) on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} ended with exit code 0 after {self.seconds:.1f} s, before the others"


def collect(exits: Iterable[Mapping[str, Any]], notes: Iterable[Mapping[str, Any]]) -> list[RankFailure]:
    """Join what torchrun saw of its ranks with what the ranks noted about themselves.

    A rank that was killed leaves no note, and a torchrun that was stopped leaves no exit codes.  A rank that
    had failed but was still ending when we stopped all has its own exit code in the note, and our signal in
    torchrun's eyes.
    """
    merged: dict[int, dict[str, Any]] = {}
    for ended in exits:
        merged[ended["rank"]] = {**ended, "summary": f"ended with {exit_text(ended['exitcode'])}"}
    for note in notes:
        seen = merged.get(note["rank"], {"kind": "stopped"})
        exitcode = note["exitcode"] if seen["kind"] == "stopped" else seen["exitcode"]
        merged[note["rank"]] = {**note, "exitcode": exitcode}
    names = {field.name for field in fields(RankFailure)}
    return [RankFailure(**{name: one[name] for name in names & one.keys()}) for one in merged.values()]


def early_ends(folder: Path) -> list[EarlyEnd]:
    """The ranks of a failed attempt that had ended with exit code 0."""
    names = {field.name for field in fields(EarlyEnd)}
    notes = read_notes(folder, "ended")
    return [EarlyEnd(**{name: note[name] for name in names & note.keys()}) for note in notes]


def read_notes(folder: Path, kind: str = "rank") -> list[dict[str, Any]]:
    """What the ranks noted about themselves: ``rank`` of those that failed, ``ended`` of those that ended
    well.
    """
    notes = []
    for file in folder.glob(f"{kind}_*.json"):
        with contextlib.suppress(FileNotFoundError):  # a rank that starts again removes its note
            notes.append(json.loads(file.read_text()))
    return notes


def exit_text(exitcode: int) -> str:
    """An exit code in words; negative means a signal."""
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"exit code {128 - exitcode} ({signal.Signals(-exitcode).name})"
    except ValueError:
        return f"exit code {128 - exitcode} (signal {-exitcode})"


def first(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that caused the others.

    Time alone does not tell: a killed rank leaves no note, and its neighbours complain within milliseconds.
    So those who only lost a peer come second, those we stopped come last, and time decides among equals.
    """
    return min(failures, key=lambda failure: (_innocence(failure), failure.time, failure.rank))


def is_own_fault(failure: RankFailure) -> bool:
    """Whether it is more than the echo of another process that ended."""
    return _innocence(failure) == 0


def obeyed(failure: RankFailure, number: int) -> bool:
    """Whether this is how a rank ends that was asked to by signal ``number``, and knows what a shell
    expects.
    """
    return failure.kind == "exit" and failure.exitcode == 128 + number


def _innocence(failure: RankFailure) -> int:
    if failure.kind == "stopped":
        return 2
    lost_a_peer = failure.kind == "raised" and _LOST_A_PEER.search(failure.summary)
    aborted = failure.kind == "died" and failure.exitcode == -signal.SIGABRT  # NCCL's and gloo's way out
    return 1 if lost_a_peer or aborted else 0


def describe(failures: list[RankFailure], ended: Iterable[EarlyEnd] = ()) -> str:
    """The block at the end of a failed job.

    A rank that ended well, but before the failure, is named: the others may have failed because it was gone.
    """
    cause = first(failures)
    early = sorted((end for end in ended if end.time < cause.time), key=lambda end: end.time)
    others = sorted((f for f in failures if f is not cause and f.kind != "stopped"), key=lambda f: f.rank)
    where = f" on {cause.host}" if cause.host else ""
    head = f"rank {cause.rank} failed{where}"
    if early and not is_own_fault(cause):
        head = f"rank {early[0].rank} ended too early"
    lines = [
        f" {head} ".center(_LINE, "="),
        *describe_early(early),
        f"rank {cause.rank} (local rank {cause.local_rank}){where} ended with {exit_text(cause.exitcode)}",
    ]
    if cause.kind != "died":
        lines += ["", cause.traceback.rstrip() or cause.summary]
    if cause.exitcode == -signal.SIGKILL:
        lines.append("SIGKILL cannot be caught; often the system is short of memory (see `dmesg`).")
    if others:
        lines += [
            "",
            "Failed after it:",
            *(f"  rank {f.rank}: {_brief(f.summary)}" for f in others[:_OTHERS]),
        ]
    if len(others) > _OTHERS:
        lines.append(f"  and {len(others) - _OTHERS} more")
    return "\n".join([*lines, "=" * _LINE])


def describe_early(ended: Iterable[EarlyEnd]) -> list[str]:
    """One line for each rank that ended with exit code 0 before the others, or the number of them."""
    lines = list(map(str, ended))
    return [*lines[:_OTHERS], *([f"and {len(lines) - _OTHERS} more"] if len(lines) > _OTHERS else [])]


def _brief(summary: str) -> str:
    first_line, *rest = summary.splitlines()
    return f"{first_line} ... {rest[-1]}" if rest else first_line
