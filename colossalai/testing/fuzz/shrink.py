"""A failing case made smaller: whatever can be left out while the failure stays the same, is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from colossalai.testing.fuzz.cases import Case, OptimizerSpec
from colossalai.testing.fuzz.judge import CaseVerdict, Pools, run_case
from colossalai.testing.fuzz.plans import PlanSpec


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
