"""The table of habits is complete, has no silent difference, and says what happens; see habits.md."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.habits.habit import all_habits
from tests.habits.judge import CLEAR_WORDS_OF_TORCH, GOOD, REFUSED, Cell
from tests.habits.page import CHINESE, PAGE, chinese, read_table, render, short
from tests.habits.plans import PLANS
from tests.habits.run import run_column

AGAIN = "if this is meant, run `python -m tests.habits` to print docs/source/en/habits.md again"
SLOW = ("gemini-auto", "gemini-cuda")
# seconds of tracing on each rank where layers communicate; CI compiles under the other plans
COMPILED = {"compile_before", "compile_after"}
TRACED_SLOWLY = ("gemini-cpu", "tensor")


def test_every_habit_has_an_answer_under_every_plan() -> None:
    table = read_table()
    assert list(table) == list(PLANS)
    for plan, cells in table.items():
        assert list(cells) == list(all_habits()), plan
        bad = {n: cell for n, cell in cells.items() if cell.outcome not in GOOD}
        assert not bad, f"{plan}: {bad}"
        assert all(cell.words for cell in cells.values() if cell.outcome == REFUSED)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == render(read_table()), AGAIN
    assert CHINESE.read_text() == render(read_table(), chinese()), AGAIN


def test_every_habit_is_translated() -> None:
    words, habits = chinese(), all_habits().values()
    assert list(words.titles) == [habit.name for habit in habits]
    prose = {habit.theme for habit in habits} | {habit.instead for habit in habits if "` " in habit.instead}
    assert sorted(prose - set(words.words)) == []


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.slow] if plan in SLOW else []) for plan in PLANS]
)
def test_the_table_says_what_happens(plan: str, pytestconfig: pytest.Config) -> None:
    """In CI each column has a third of the rows, and its neighbours the others."""
    wanted = read_table()[plan]
    names = list(wanted)
    if not pytestconfig.getoption("--all-cases"):
        names = names[list(PLANS).index(plan) % 3 :: 3]
        names = [n for n in names if n not in COMPILED or plan not in TRACED_SLOWLY]
    found = run_column(plan, "booster", names)
    assert list(found) == names
    habits = all_habits()
    changed = {
        n: (cell, wanted[n])
        for n, cell in found.items()
        if cell.outcome != wanted[n].outcome
        # where ranks do different things, it depends on which is first what each of them says of the others
        or (not habits[n].breaks and not _say_the_same(cell.words, wanted[n].words))
    }
    assert not changed, f"{plan}: {_lines(changed)}\n{AGAIN}"


@pytest.mark.slow
@pytest.mark.parametrize("plan", [name for name, plan in PLANS.items() if plan.engine_config is not None])
def test_an_engine_gives_the_same_answers(plan: str) -> None:
    wanted = read_table()[plan]
    names = [name for name, habit in all_habits().items() if habit.engine]
    found = run_column(plan, "engine", names)
    changed = {
        name: (cell, wanted[name]) for name, cell in found.items() if cell.outcome != wanted[name].outcome
    }
    assert not changed, f"{plan}: {_lines(changed)}"


def _say_the_same(found: str, wanted: str) -> bool:
    """Whether a refusal is that of the table; an older torch has other words around those that we know it
    by.
    """
    if short(found) == wanted:
        return True
    return TorchVersion(torch.__version__) < "2.13" and any(
        any(words in found for words in same) and any(words in wanted for words in same)
        for same in CLEAR_WORDS_OF_TORCH
    )


def _lines(changed: dict[str, tuple[Cell, Cell]]) -> str:
    return "".join(f"\n{name}: {now}, in the table {before}" for name, (now, before) in changed.items())
