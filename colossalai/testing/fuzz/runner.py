"""Many cases in a row: counts, refusals, failures made smaller, and the report."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from colossalai.testing.fuzz.cases import Case, OptimizerSpec, random_case
from colossalai.testing.fuzz.judge import EQUAL, FAILURES, REFUSED, UNSTABLE, CaseVerdict, Pools, run_case
from colossalai.testing.fuzz.plans import PlanSpec
from colossalai.testing.fuzz.script import script_text

# ---- A failing case made smaller: whatever can be left out while the failure stays the same, is ----


def shrink(
    case: Case, verdict: CaseVerdict, pools: Pools, *, seconds: float = 60.0
) -> tuple[Case, CaseVerdict]:
    """The smallest case that is found within ``seconds`` and fails in the same way, with its verdict."""
    deadline = time.monotonic() + seconds
    best, found = copy.deepcopy(case), verdict
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(best):
            if time.monotonic() > deadline:
                return best, found
            try:
                again = run_case(smaller, pools)
            except Exception:  # what is left fits together no more
                continue
            if again.failed and again.kind == found.kind:
                best, found, progress = smaller, again, True
                break
    return best, found


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those first that leave out most."""
    if case.b is not None:
        yield _with(case, _drop_reload)
    for i in range(len(case.habits)):
        yield _with(case, _pop(lambda c: c.habits, i))
    for i in range(1, len(case.model.blocks) - 1):
        yield _with(case, _pop(lambda c: c.model.blocks, i))
    if case.steps > 1 and (case.save_at is None or case.save_at < case.steps - 1):
        yield _with(case, _one_step_less)
    if case.save_at is not None and case.save_at > 1:
        yield _with(case, _save_earlier)
    if case.accumulate > 1:
        yield _with(case, lambda c: setattr(c, "accumulate", 1))
    if case.scheduler:
        yield _with(case, lambda c: setattr(c, "scheduler", False))
    yield from _simpler_model(case)
    yield from _simpler_optimizer(case)
    for which in ("a", "b"):
        yield from _simpler_plan(case, which)


def _simpler_model(case: Case) -> Iterator[Case]:
    if case.model.shared:
        yield _with(case, lambda c: c.model.shared.clear())
    if case.model.tied:
        yield _with(case, lambda c: setattr(c.model, "tied", False))
    if case.model.root == "Net":
        yield _with(case, lambda c: setattr(c.model, "root", "Sequential"))
    for i, block in enumerate(case.model.blocks):
        if block.frozen:
            yield _with(case, _unfreeze(i))


def _simpler_optimizer(case: Case) -> Iterator[Case]:
    optimizer = case.optimizer
    if optimizer.groups:
        yield _with(case, lambda c: setattr(c.optimizer, "groups", False))
    if optimizer.trainable_only:
        yield _with(case, lambda c: setattr(c.optimizer, "trainable_only", False))
    if optimizer.kind != "torch.optim.SGD" or len(optimizer.options) > 1:
        yield _with(case, lambda c: setattr(c, "optimizer", OptimizerSpec()))


def _simpler_plan(case: Case, which: str) -> Iterator[Case]:
    plan = getattr(case, which)
    if plan is None:
        return
    if case.b is not None and case.a == case.b and which == "b":
        return  # the two are the same on purpose
    both = case.b is not None and case.a == case.b
    targets = ("a", "b") if both else (which,)

    def change(act: Callable[[PlanSpec], object]) -> Case:
        smaller = copy.deepcopy(case)
        for target in targets:
            act(getattr(smaller, target))
        return smaller

    if plan.ranks > plan.least_ranks:
        yield change(lambda p: setattr(p, "ranks", p.least_ranks))
        if plan.ranks > 2 and plan.least_ranks == 1:
            yield change(lambda p: setattr(p, "ranks", 2))
    if plan.precision != "fp32":
        yield change(lambda p: setattr(p, "precision", "fp32"))
    for option in plan.options:
        if option not in plan.needed_options:
            yield change(_without(option))


def _with(case: Case, change: Callable[[Case], object]) -> Case:
    smaller = copy.deepcopy(case)
    change(smaller)
    return smaller


def _pop(items: Callable[[Case], list[Any]], i: int) -> Callable[[Case], object]:
    return lambda case: items(case).pop(i)


def _unfreeze(i: int) -> Callable[[Case], object]:
    return lambda case: setattr(case.model.blocks[i], "frozen", False)


def _without(option: str) -> Callable[[PlanSpec], object]:
    return lambda plan: plan.options.pop(option)


def _drop_reload(case: Case) -> None:
    case.b, case.save_at = None, None


def _one_step_less(case: Case) -> None:
    case.steps -= 1
    case.habits = [h for h in case.habits if h.at is None or h.at < case.steps]


def _save_earlier(case: Case) -> None:
    assert case.save_at is not None
    case.save_at -= 1


RANKS = (1, 2, 2, 2, 3, 4)  # two ranks most often: there most is seen, and they are quick


@dataclass
class FailedCase:
    """A case that failed, as small as it could be made."""

    case: Case
    verdict: CaseVerdict
    script: str
    first: Case


@dataclass
class Summary:
    """The counts of all cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    by_plan: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[FailedCase] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, case: Case, verdict: CaseVerdict) -> None:
        self.outcomes[verdict.outcome] += 1
        for name in {plan.name for plan in case.plans}:
            self.by_plan.setdefault(name, Counter())[verdict.outcome] += 1
        if verdict.outcome == REFUSED:
            self.refusals[verdict.headline] += 1

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return sum(self.outcomes[name] for name in FAILURES)

    def text(self) -> str:
        """The report of a run."""
        lines = [f"{self.cases} cases in {self.seconds:.0f} s: {_counts(self.outcomes)}"]
        for name in sorted(self.by_plan):
            lines.append(f"  {name:12} {_counts(self.by_plan[name])}")
        if self.refusals:
            lines.append("refusals:")
            lines += [f"  {count:4} {text}" for text, count in self.refusals.most_common()]
        return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(
        f"{name} {counter[name]}" for name in (EQUAL, REFUSED, UNSTABLE, *FAILURES) if counter[name]
    )


def fuzz(
    cases: Iterable[Case],
    *,
    minutes: float | None = None,
    limit: float = 20.0,
    shrink_seconds: float = 60.0,
    most_failures: int = 5,
    prepare: Callable[[], None] | None = None,
    out: TextIO | None = None,
    folder: Path | None = None,
) -> Summary:
    """Run ``cases`` until they end, ``minutes`` are over, or ``most_failures`` have failed.

    Args:
        limit: the seconds that all ranks may do nothing before a run counts as a hang.
        shrink_seconds: how long a failure is made smaller; 0 leaves it as it is.
        prepare: is called in every rank first (tests plant bugs in this way).
        out: where the progress is told; None tells nothing.
        folder: where the scripts of failures are written, too.
    """
    summary, pools, start = Summary(), Pools(prepare, limit), time.monotonic()
    try:
        for case in cases:
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                break
            verdict = run_case(case, pools)
            summary.add(case, verdict)
            summary.seconds = time.monotonic() - start
            if verdict.failed:
                summary.failures.append(_report(case, verdict, pools, shrink_seconds, out, folder))
                if len(summary.failures) >= most_failures:
                    break
            elif out is not None and (summary.cases % 20 == 0):
                print(f"{summary.seconds:6.0f} s  {_counts(summary.outcomes)}", file=out, flush=True)
    finally:
        pools.close()
    summary.seconds = time.monotonic() - start
    return summary


def _report(
    case: Case, verdict: CaseVerdict, pools: Pools, seconds: float, out: TextIO | None, folder: Path | None
) -> FailedCase:
    small, found = shrink(case, verdict, pools, seconds=seconds) if seconds else (case, verdict)
    failure = FailedCase(small, found, script_text(small), case)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"case-{case.seed}-{case.index}"
        (folder / f"{stem}.py").write_text(failure.script)
        (folder / f"{stem}.json").write_text(small.to_json())
        (folder / f"{stem}.txt").write_text(
            f"{case.describe()}\n{small.describe()}\n{found.message}\n{found.details}"
        )
    if out is not None:
        bar = "-" * 100
        print(
            "\n"
            f"{bar}\n"
            f"{found.outcome}: case {case.seed}:{case.index}: {case.describe()}\n"
            f"{found.message}\n"
            "\n"
            f"smaller: {small.describe()}\n"
            "again: python -m colossalai.testing.fuzz --case"
            f" '{small.to_json()}'\n{bar}\n{failure.script}{bar}\n{found.details}\n{bar}",
            file=out,
            flush=True,
        )
    return failure


def seeded_cases(seed: int, count: int | None, ranks: Iterable[int] = RANKS) -> Iterable[Case]:
    """The cases of ``seed``, ``count`` of them or without end."""
    allowed, index = list(ranks), 0
    while count is None or index < count:
        yield random_case(seed, index, allowed)
        index += 1
