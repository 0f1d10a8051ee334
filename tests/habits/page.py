"""The table on paper: ``table.json`` holds the outcomes, ``habits.md`` is made of them and of the words
of the rows; ``zh-Hans.json`` has these words in Chinese.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from tests.habits.habit import Habit, all_habits
from tests.habits.judge import EQUAL, PIECE, REFUSED, UNWRITTEN, Cell
from tests.habits.plans import PLANS

Table = dict[str, dict[str, Cell]]  # by plan and habit

TABLE = Path(__file__).parent / "table.json"
PAGE = Path(__file__).parents[2] / "docs/source/en" / "habits.md"
CHINESE = PAGE.parents[1] / "zh-Hans" / PAGE.name
_LONGEST = 240
_WRAPPER = textwrap.TextWrapper(110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
_MORE = " ..."  # of words that were made short

HEAD = """# Habits of scripts, under each plan

What scripts do, and what comes of it under each plan. Every cell is computed: the habit runs on plain PyTorch
with the joined batch and on 2 ranks under the plan, and losses, weights at the end, and all that the script
itself looked at are compared (`tests/habits`; `python -m tests.habits` prints this page again, and the tests
compare it with what happens).

- **equal**: losses, weights and what the script has seen are those of plain PyTorch.
- **piece**: so they are, but a rank sees its own part: its piece of a weight that tensor parallelism has cut,
  or the layers of its stage; shapes and names say so.
- **refused**: an error on every rank, ours or a clear one of torch's, whose words are below the table; where
  it begins with "on one rank", the others wait until that rank has ended the job.
- **-**: the plan has no place for it: in a pipeline the schedule runs the model, micro-batch by micro-batch,
  so scripts do not call it.

With `colossalai.initialize` and an `Engine` in the place of a `Booster` the answers are the same (there is no
FSDP, nor saving by a booster). All runs are in float32; *Gemini* is `GeminiPlugin` with the placement
policies `cpu`, `auto` and `cuda`, *tensor* is [`parallelize`](parallelize.md) in 1D, *pipeline* is
[`split_model`](pipeline_stages.md) with two stages and two micro-batches.
"""


@dataclass(frozen=True)
class Words:
    """What the page says in a language; errors stay in English."""

    head: str
    titles: Mapping[str, str] = field(default_factory=dict)  # of habits by name
    words: Mapping[str, str] = field(default_factory=dict)  # by the English ones

    def title(self, habit: Habit) -> str:
        return _escaped(self.titles.get(habit.name, habit.title))

    def __getitem__(self, english: str) -> str:
        return self.words.get(english, english)


def chinese() -> Words:
    raw = json.loads(Path(__file__).with_name("zh-Hans.json").read_text())
    return Words("\n".join([*raw["head"], ""]), raw["titles"], raw["words"])


def write_pages(table: Table) -> None:
    PAGE.write_text(render(table))
    CHINESE.write_text(render(table, chinese()))


def read_table() -> Table:
    raw = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {plan: {name: Cell(*cell) for name, cell in cells.items()} for plan, cells in raw.items()}


def write_table(table: Table) -> None:
    names = list(all_habits())
    plain = {
        plan: {name: [cells[name].outcome, short(cells[name].words)] for name in names if name in cells}
        for plan, cells in ((plan, table[plan]) for plan in PLANS if plan in table)
    }
    TABLE.write_text(json.dumps(plain, indent=1) + "\n")


def render(table: Table, words: Words | None = None) -> str:
    """The page, in English where no `words` are given."""
    words = words or Words(HEAD)
    parts = [words.head]
    for theme, rows in groupby(all_habits().values(), key=lambda habit: habit.theme):
        parts.append("\n".join(_theme(theme, list(rows), table, words)))
    return "\n".join(parts)


def _theme(theme: str, rows: list[Habit], table: Table, words: Words) -> Iterator[str]:
    yield f"## {words[theme]}\n"
    yield f"| {words['habit']} | " + " | ".join(words[plan.title] for plan in PLANS.values()) + " |"
    yield "|---" * (len(PLANS) + 1) + "|"
    for row in rows:
        cells = [words[_MARK[table[plan][row.name].outcome]] for plan in PLANS]
        yield f"| {words.title(row)} | " + " | ".join(cells) + " |"
    yield ""
    for row in rows:
        instead = f" {words['Instead']}: {words[row.instead]}." if row.instead else ""
        if said := list(_said({plan: table[plan][row.name] for plan in PLANS}, words)):
            text = f"- {words.title(row)}: {'; '.join(said)}.{instead}"
            yield from textwrap.wrap(
                text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    yield ""


_MARK = {EQUAL: "equal", PIECE: "piece", REFUSED: "refused", UNWRITTEN: "-"}


def _said(cells: Mapping[str, Cell], language: Words) -> Iterator[str]:
    """Who refuses in which words."""
    refused = {plan: cell.words for plan, cell in cells.items() if cell.outcome == REFUSED}
    for words in dict.fromkeys(refused.values()):
        who = ", ".join(language[PLANS[plan].title] for plan in refused if refused[plan] == words)
        yield f"{who}: “{_escaped(words)}”"


def short(words: str) -> str:
    """As much as a reader needs to know a refusal again; what to do is said in the rest."""
    if words.endswith(_MORE):
        return words
    words = words.split("; ")[0].split(". ")[0].rstrip(".")
    return words if len(words) <= _LONGEST else words[:_LONGEST].rsplit(" ", 1)[0] + _MORE


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
