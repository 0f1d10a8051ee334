"""The outcome of a cell is computed: what a rank has seen against what the serial script has seen, then all
ranks together.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import colossalai
from colossalai.core import global_context as gpc
from colossalai.mesh import shard
from tests.habits.habit import Habit
from tests.habits.script import CannotBeWritten, Script, Seen

_OURS = str(Path(colossalai.__file__).parent)
# What torch itself says, as clearly as we would, on every rank.
CLEAR_WORDS_OF_TORCH = (  # each with those of older versions
    ("Expected to have finished reduction in the prior iteration",),  # DDP, of a parameter without a gradient
    ("size mismatch for",),  # a state of whole tensors, loaded into pieces
    ("Unexpected key(s) in state_dict",),  # a state of the whole model, loaded into a stage
    ("FSDP does not support deepcopy",),
    ("which lie in a chunk and are whole only while",),  # ours, in the words of torch's load_state_dict
    ("got mixed torch.Tensor and DTensor",),  # FSDP: a weight that is cut meets an ordinary tensor
    ("tolist() is not supported for tensor subclasses",),
    ("Cannot flatten unevenly sharded tensor", "Attempted to flatten unevenly sharded dimension"),
    (
        "appears to not have been used in the graph",
    ),  # autograd.grad of weights that FSDP does not compute with
)

EQUAL, PIECE, REFUSED, UNWRITTEN = "equal", "piece", "refused", "unwritten"
GOOD = (EQUAL, PIECE, REFUSED, UNWRITTEN)
DIFFERENT, CRASHED, HANG = "different", "crashed", "hang"


@dataclass(frozen=True)
class Cell:
    """What became of a habit under a plan: an outcome and, but for ``equal``, words."""

    outcome: str
    words: str = ""


@dataclass
class Report:
    """What one rank says of a cell."""

    problems: list[str] = field(default_factory=list)
    pieces: bool = False
    error: tuple[str, str] | None = None  # its kind and its words
    is_ours: bool = False
    is_torchs: bool = False  # one of those that the habit calls clear
    unwritten: bool = False
    means: list[float | None] = field(default_factory=list)
    missing: list[set[str]] = field(default_factory=list)
    trace: str = ""
    alike: dict[str, float] = field(default_factory=dict)  # sums of weights that every rank holds whole
    tolerance: float = 0.0


def run_script(script: Script) -> tuple[dict[str, Tensor] | None, BaseException | None]:
    """The whole script of a habit; what it raises is part of what it does."""
    try:
        script.begin()
        if not script.habit.prepares:
            script.prepare(script.build())
        script.habit.run(script)
        script.agreement()
        return script.weights(), None
    except Exception as error:
        return None, error


def report(habit: Habit, plan: str, serial: Script, planned: Script, results: tuple[Any, Any]) -> Report:
    """This rank's view."""
    (expected, serial_error), (weights, error) = results
    if serial_error is not None:
        raise AssertionError(f"the habit {habit.name} fails on plain PyTorch") from serial_error
    found = Report(tolerance=habit.tolerance)
    if isinstance(error, CannotBeWritten):
        found.unwritten = True
        return found
    if error is not None:
        words = str(error).strip()
        found.error = (type(error).__name__, words)
        found.is_ours = _is_ours(error)
        found.is_torchs = any(clear in words for same in CLEAR_WORDS_OF_TORCH for clear in same)
        found.trace = "".join(traceback.format_exception(error))[-3000:]
        return found
    found.pieces = planned.pieces
    _compare_seen(found, habit, serial.seen, planned.seen)
    if planned.final is not None:
        assert serial.final is not None
        seen = found.pieces  # that weights are cut at the end is no news
        _compare_each(found, serial.final, planned.final, habit.compare)
        found.pieces = seen
        found.missing.pop()  # nor are names of a tied weight, of which a stage may have another
    if habit.compare and weights is not None:
        assert expected is not None
        if set(weights) != set(expected):
            found.problems.append(f"the saved names differ: {sorted(set(weights) ^ set(expected))}")
        for name in weights.keys() & expected.keys():
            _compare(found, f"saved {name}", weights[name], expected[name])
    return found


def _compare_seen(found: Report, habit: Habit, serial: Sequence[Seen], planned: Sequence[Seen]) -> None:
    if [s.label for s in serial] != [s.label for s in planned]:
        found.problems.append(
            f"saw {[s.label for s in planned]} where the serial script saw {[s.label for s in serial]}"
        )
        return
    for want, got in zip(serial, planned, strict=True):
        if want.kind == "mean":
            found.means.append(got.value if habit.compare else want.value)
        elif want.kind == "each":
            _compare_each(found, want, got, habit.compare)
        elif got.value is not None:
            _compare(found, want.label, got.value, want.value)


def _compare_each(found: Report, want: Seen, got: Seen, values: bool) -> None:
    found.missing.append(set(want.value) - set(got.value))
    assert got.of is not None
    for name, (value, layout) in got.value.items():
        if want.label == "weight" and isinstance(value, Tensor) and not (layout and layout.sharded):
            found.alike[name] = float(value.double().sum())
        if name not in want.value:
            found.problems.append(f"{want.label} of {name}, which the serial model has not")
            continue
        whole = want.value[name][0]
        if whole is None or value is None:
            if whole is not value and values:
                found.problems.append(f"{want.label} of {name} is {_short(value)}, serially {_short(whole)}")
        elif not values or _is_close(value, _copied(got.of(whole)), found.tolerance):
            pass
        elif (
            layout is not None
            and layout.sharded
            and _is_close(value, _copied(got.of(_piece(whole, layout))), found.tolerance)
        ):
            found.pieces = True
        else:
            _compare(found, f"{want.label} of {name}", value, _copied(got.of(whole)))


def _piece(whole: Tensor, layout: Any) -> Tensor:
    return shard(whole, layout, gpc.mesh, uneven=True)


def _copied(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _compare(found: Report, label: str, got: Any, want: Any) -> None:
    if not _is_close(got, want, found.tolerance):
        found.problems.append(f"{label} is {_short(got)}, serially {_short(want)}{_distance(got, want)}")


def _distance(got: Any, want: Any) -> str:
    if not (isinstance(got, Tensor) and isinstance(want, Tensor)) or got.shape != want.shape:
        return ""
    return f" ({(got.double() - want.double()).abs().max().item():.2g} apart)"


def _is_close(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        return torch.allclose(got.cpu(), want.cpu(), equal_nan=True, rtol=tolerance, atol=tolerance / 10)
    if isinstance(want, dict) and isinstance(got, dict):
        return set(want) == set(got) and all(_is_close(got[k], want[k], tolerance) for k in want)
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        return len(want) == len(got) and all(
            _is_close(g, w, tolerance) for g, w in zip(got, want, strict=True)
        )
    if isinstance(want, float) and isinstance(got, float | int):
        return math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance / 10) or (
            math.isnan(want) and math.isnan(got)
        )
    return bool(got == want)


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.ndim:
        return f"a tensor {tuple(value.shape)} {value.dtype} of norm {value.double().norm():.4g}"
    return str(value)[:80]


def _is_ours(error: BaseException) -> bool:
    """Whether the exception was raised by a line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def verdict(reports: Sequence[Report], means: Sequence[float], stages: bool = False) -> Cell:
    """What all ranks say together; with ``stages``, each of them has some layers."""
    if all(r.unwritten for r in reports):
        return Cell(UNWRITTEN)
    errors = [r for r in reports if r.error is not None]
    if errors:
        first = next((r for r in errors if not (r.is_ours or r.is_torchs)), errors[0])
        assert first.error is not None
        words = f"{first.error[0]}: {normal(first.error[1])}"
        if len(errors) < len(reports):
            return Cell(CRASHED, f"on {len(errors)} of {len(reports)} ranks only: {words}")
        clear = all(r.is_ours or r.is_torchs for r in errors)
        return Cell(REFUSED, normal(first.error[1])) if clear else Cell(CRASHED, f"{words}\n{first.trace}")
    problems = [problem for r in reports for problem in r.problems]
    problems += _compare_means([r.means for r in reports], means, reports[0].tolerance)
    for name in set.intersection(*(set(r.alike) for r in reports)):
        if len({r.alike[name] for r in reports if not math.isnan(r.alike[name])}) > 1:
            problems.append(f"{name} is not the same on all ranks")
    pieces = any(r.pieces for r in reports)
    for missing in zip(*[r.missing for r in reports], strict=True):
        lost = set.intersection(*missing)
        pieces = pieces or (bool(lost) and stages)  # what one rank looks at is its stage
        if lost and not pieces:
            problems.append(f"no rank has {sorted(lost)}")
    if problems:
        return Cell(DIFFERENT, "; ".join(dict.fromkeys(problems))[:600])
    return Cell(PIECE if pieces else EQUAL)


def _compare_means(
    got: Sequence[Sequence[float | None]], want: Sequence[float], tolerance: float
) -> list[str]:
    found = []
    for number, (serial, values) in enumerate(zip(want, zip(*got, strict=True), strict=False)):
        own = [v for v in values if v is not None]
        mean = sum(own) / len(own) if own else math.nan
        if not _is_close(mean, serial, tolerance):
            found.append(f"loss {number} is {mean:.6g}, serially {serial:.6g}")
    return found


def normal(words: str) -> str:
    """The words of a refusal without what changes from run to run."""
    words = re.sub(r"/\S*?/final\.bin|/tmp/\S+", "PATH", words)
    words = re.sub(r"\brank \d+", "rank N", words)
    words = re.sub(r"0x[0-9a-f]+", "0x...", words)
    return re.sub(r"\s+", " ", words).strip()
