"""``python -m tests.habits [PLAN ...]``: compute the table, or some columns of it, and print habits.md
again.
"""

from __future__ import annotations

import sys
import time

from tests.habits.habit import all_habits
from tests.habits.judge import GOOD
from tests.habits.page import read_table, write_pages, write_table
from tests.habits.plans import PLANS
from tests.habits.run import run_column


def main() -> None:
    table, names = read_table(), list(all_habits())
    for plan in sys.argv[1:] or PLANS:
        began = time.monotonic()
        table[plan] = run_column(plan, "booster", names)
        print(f"{plan}: {time.monotonic() - began:.0f} s", flush=True)
        for name, cell in table[plan].items():
            if cell.outcome not in GOOD:
                print(f"  {name}: {cell.outcome}: {cell.words[:300]}", flush=True)
        write_table(table)
    if all(plan in table for plan in PLANS):
        write_pages(table)


if __name__ == "__main__":
    main()
