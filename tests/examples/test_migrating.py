"""What the table of migrating.md calls by name exists."""

from __future__ import annotations

from colossalai.booster.plans import PLANS
from docs.pages import ENGLISH

PAGE = ENGLISH / "migrating.md"


def test_the_plans_of_the_table_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    named = {name for name in PLANS if any(f'"{name}"' in row for row in rows)}
    assert named == PLANS.keys() - {"torch_ddp", "torch_fsdp"}
