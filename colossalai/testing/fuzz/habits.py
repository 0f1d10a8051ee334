"""Habits of users around a step, as lines of Python: for the serial model and for the boosted one.

The two must mean the same.  A habit is *every* step's, or happens once, ``at`` a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from colossalai.testing.fuzz.plans import PlanSpec

Lines = list[str]


@dataclass
class Habit:
    """One habit of a case: its name in ``HABITS``, when, and a number that it needs."""

    name: str
    at: int | None = None
    value: Any = None


@dataclass(frozen=True)
class HabitKind:
    """The lines of a habit.  ``{v}`` is its value; ``place`` is where in the step it belongs."""

    place: str  # before, clip, zero, after
    serial: str
    boosted: str
    once: bool = False
    value: Callable[[Random], Any] = lambda r: None
    lasting: bool = False  # must be done again by a run that begins later
    weight: float = 1.0


_EVALUATE = """
model.eval()
with torch.no_grad():
    log("evaluation", step, loss_of(model, {data}).item())
model.train()
"""

HABITS: dict[str, HabitKind] = {
    "clip norm": HabitKind(
        "clip",
        'log("norm", step, torch.nn.utils.clip_grad_norm_(model.parameters(), {v}).item())',
        'log("norm", step, optimizer.clip_grad_by_norm({v}).item())',
        value=lambda r: r.choice([0.05, 0.5, 100.0]),
        weight=3,
    ),
    "clip quietly": HabitKind(
        "clip",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), {v})",
        "optimizer.clip_grad_by_norm({v})",
        weight=0,  # what becomes of "clip norm" where a config clips
    ),
    "clip value": HabitKind(
        "clip",
        "torch.nn.utils.clip_grad_value_(model.parameters(), {v})",
        "optimizer.clip_grad_by_value({v})",
        value=lambda r: r.choice([0.01, 0.1]),
    ),
    "torch clips": HabitKind(
        "clip",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), {v})",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), {v})",
        value=lambda r: r.choice([0.05, 0.5]),
        weight=0.5,
    ),
    "zero to zero": HabitKind(
        "zero", "optimizer.zero_grad(set_to_none=False)", "optimizer.zero_grad(set_to_none=False)"
    ),
    "zero the model": HabitKind("zero", "model.zero_grad()", "model.zero_grad()"),
    "evaluate": HabitKind(
        "after", _EVALUATE.format(data="evaluation()"), _EVALUATE.format(data="evaluation()"), weight=2
    ),
    "read weights": HabitKind(
        "after",
        'log("weights", step, weights(model))',
        'log("weights", step, weights(model))',
        once=True,
        weight=2,
    ),
    "optimizer to itself": HabitKind(
        "after",
        "optimizer.load_state_dict(optimizer.state_dict())",
        "optimizer.load_state_dict(optimizer.state_dict())",
        once=True,
    ),
    "model to itself": HabitKind(
        "after",
        "model.load_state_dict(model.state_dict())",
        "model.load_state_dict(model.state_dict())",
        once=True,
    ),
    "model by a file": HabitKind(
        "after",
        "",
        'booster.save_model(model, f"{folder}/model.pt")\nbooster.load_model(model, f"{folder}/model.pt")',
        once=True,
    ),
    "optimizer by a file": HabitKind(
        "after",
        "",
        'booster.save_optimizer(optimizer, f"{folder}/optimizer.pt")\n'
        'booster.load_optimizer(optimizer, f"{folder}/optimizer.pt")',
        once=True,
    ),
    "other weights": HabitKind(
        "before",
        "model.load_state_dict(build(77).state_dict())",
        'torch.save(build(77).state_dict(), f"{folder}/other{rank}.pt")\n'
        'booster.load_model(model, f"{folder}/other{rank}.pt")',
        once=True,
    ),
    "edit weights": HabitKind(
        "after",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)",
        once=True,
    ),
    "edit rate": HabitKind(
        "after",
        'for group in optimizer.param_groups:\n    group["lr"] *= 0.5',
        'for group in optimizer.param_groups:\n    group["lr"] *= 0.5',
        once=True,
    ),
    "freeze": HabitKind(
        "before",
        "freeze(model)",
        "freeze(model)",
        once=True,
        lasting=True,
    ),
    "skip a step": HabitKind(
        "before",
        "loss_of(model, parts(batch(step), cuts[step][0])[0]).backward()\noptimizer.zero_grad()",
        "booster.backward(loss_of(model, mine(batch(step))), optimizer)\noptimizer.zero_grad()",
        once=True,
    ),
    "forward only": HabitKind(
        "before",
        "loss_of(model, parts(batch(step), cuts[step][0])[0])",
        "loss_of(model, mine(batch(step)))",
        once=True,
    ),
    "save in between": HabitKind("after", "", 'booster.save(f"{folder}/between")', once=True),
    "save in the background": HabitKind(
        "after", "", 'booster.save(f"{folder}/background", background=True)', once=True
    ),
    "back to a save": HabitKind(
        "after", "", 'booster.save(f"{folder}/back")\nbooster.load(f"{folder}/back")', once=True
    ),
}
_PLACES = ("before", "clip", "zero", "after")


def random_habits(r: Random, steps: int) -> list[Habit]:
    """Draw a few habits, at most one way to clip and one to clear gradients."""
    names = sorted(HABITS)
    weights = [HABITS[name].weight for name in names]
    chosen: list[Habit] = []
    for _ in range(r.choices([0, 1, 2, 3], [3, 4, 3, 1])[0]):
        name = r.choices(names, weights)[0]
        kind = HABITS[name]
        if kind.place in ("clip", "zero") and any(HABITS[h.name].place == kind.place for h in chosen):
            continue
        chosen.append(Habit(name, r.randrange(steps) if kind.once else None, kind.value(r)))
    return chosen


_STAGES_CAN = {
    "clip norm",
    "clip value",
    "zero to zero",
    "zero the model",
    "edit weights",
    "edit rate",
    "optimizer to itself",
    "model to itself",
    "model by a file",
    "other weights",
    "save in between",
    "save in the background",
    "back to a save",
}


def fitting(habits: list[Habit], plans: list[PlanSpec]) -> list[Habit]:
    """Those habits that can be written down for all of ``plans``."""
    engine = any(plan.engine for plan in plans)
    found = []
    for habit in habits:
        if any(plan.pipeline > 1 for plan in plans) and habit.name not in _STAGES_CAN:
            continue
        if habit.name == "read weights" and any(plan.tensor > 1 for plan in plans):
            continue  # a rank has its pieces
        if engine and habit.name == "clip norm":
            habit = Habit("clip quietly", habit.at, habit.value)
        elif engine and (HABITS[habit.name].place == "clip" or "booster." in HABITS[habit.name].boosted):
            continue
        found.append(habit)
    return found


def lines_of(habits: list[Habit], place: str, *, serial: bool) -> Lines:
    """What the habits of ``place`` write into the body of the loop over ``step``."""
    found: Lines = []
    for habit in habits:
        kind = HABITS[habit.name]
        text = (kind.serial if serial else kind.boosted).replace("{v}", repr(habit.value)).strip("\n")
        if kind.place != place or not text:
            continue
        body = text.split("\n")
        if habit.at is None:
            found += body
        else:
            found += [f"if step == {habit.at}:", *(f"    {line}" for line in body)]
    return found
