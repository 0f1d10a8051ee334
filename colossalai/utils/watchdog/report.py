"""Snapshots of several ranks as a text that a person can act on: who waits where, who is behind, then the
stacks.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping

from colossalai.utils.watchdog.snapshot import Frame, Issued, RankSnapshot, show_ranks

_PLURAL = {"waits": "wait", "is": "are", "has": "have", "does": "do"}


def explain(states: Mapping[int, RankSnapshot | None], *, stacks: bool = True) -> str:
    """Describe the ranks in ``states``; a rank that did not answer has ``None``.

    Ranks in the same state share a line, and ranks with the same stack share the stack.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        alike.setdefault(_sentence(state), []).append(rank)
    lines = [
        f"{_ranks(ranks)} {verb if len(ranks) == 1 else _PLURAL[verb]} {rest}"
        for (verb, rest), ranks in alike.items()
    ]
    lines += _counts(states)
    return "\n".join(lines + (_stacks(states) if stacks else []))


def _sentence(state: RankSnapshot | None) -> tuple[str, str]:
    if state is None:
        return "does", "not answer: the process is stopped, or a call into C holds the interpreter lock"
    if state.left or not state.threads:
        return "has", "left the function"
    if state.wait is not None:
        wait = state.wait
        via = "" if wait.user == wait.caller else f", reached from {_place(wait.user)}"
        return "waits", f"in {wait.kind} ({wait.group}) called at {_place(wait.caller)}{via}"
    _, frames = state.threads[0]
    frame = next((f for f in reversed(frames) if not f.of_torch), frames[-1])
    source = _source(frame)
    after = (
        f"; its last collective was {_last(state.issued[-1])} on {state.issued[-1].group}"
        if state.issued
        else ""
    )
    return "is", f"at {_place(frame)}{f': {source}' if source else ''}{after}"


def _last(issued: Issued) -> str:
    return f"{issued.kind} issued at {_place(issued.caller)}"


def _counts(states: Mapping[int, RankSnapshot | None]) -> list[str]:
    """One line for each group whose members have not issued the same number of collectives: the fewest are
    late.
    """
    groups: dict[str, dict[int, Issued]] = {}
    for rank, state in states.items():
        for issued in state.issued if state is not None else ():
            groups.setdefault(issued.group_name, {})[rank] = issued
    lines = []
    for members in groups.values():
        furthest = max(members.values(), key=lambda issued: issued.count)
        by_count: dict[int, list[int]] = {}
        for rank in furthest.ranks:
            if states.get(rank) is not None:
                by_count.setdefault(members[rank].count if rank in members else 0, []).append(rank)
        if len(by_count) > 1:
            parts = [
                f"{count or 'none'} by {_ranks(by_count[count])}" for count in sorted(by_count, reverse=True)
            ]
            parts[0] += f", the last being {_last(furthest)}"
            lines.append(f"collectives issued on {furthest.group}: {'; '.join(parts)}")
    return lines


def _stacks(states: Mapping[int, RankSnapshot | None]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        if state is not None and not state.left:
            text = "\n".join(line for name, frames in state.threads for line in _stack(name, frames))
            alike.setdefault(text, []).append(rank)
    return [f"\n{_ranks(ranks)}, innermost call last:\n{text}" for text, ranks in alike.items()]


def _stack(name: str, frames: Iterable[Frame]) -> list[str]:
    lines = [f"  {name}:"]
    for frame in frames:
        lines.append(f'    File "{frame.file}", line {frame.line}, in {frame.name}')
        if source := _source(frame):
            lines.append(f"      {source}")
    return lines


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + show_ranks(ranks)


def _place(frame: Frame) -> str:
    path = os.path.relpath(frame.file)
    return f"{frame.file if path.startswith(os.pardir) else path}:{frame.line} in {frame.name}"


def _source(frame: Frame) -> str:
    return linecache.getline(frame.file, frame.line).strip()
