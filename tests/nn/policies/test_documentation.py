"""parallelize.md lists the rules and the architectures that there are."""

from __future__ import annotations

import pytest

from colossalai.nn import policies
from docs.pages import ENGLISH

pytest.importorskip("transformers", reason="needs `pip install transformers`")

PAGE = (ENGLISH / "parallelize.md").read_text()


def test_the_tables_are_complete() -> None:
    rules = set(policies.__all__) - {"POLICIES", "Policy", "Rule", "parallelize"}
    assert [name for name in rules if f"{name}(" not in PAGE] == []
    kinds = [kind for policy in policies.POLICIES for kind in policy.model_types]
    table = PAGE[PAGE.index("| model_type") : PAGE.index("- In 1D, modules")]
    assert [kind for kind in kinds if kind not in table] == []
