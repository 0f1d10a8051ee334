"""The examples of docs/source/en/testing.md are tests, and they pass."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import colossalai.testing

PAGE = Path(__file__).parents[2].joinpath("docs/source/en/testing.md").read_text()


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "documented_tests.py").write_text(
        "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    )
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("documented_tests")


def test_the_examples_pass(examples: ModuleType) -> None:
    examples.test_mean()
    examples.test_big_mesh()
    (mark,) = examples.test_sizes.pytestmark
    ran = [param for param in mark.args[1] if not param.marks]
    assert len(ran) == 6
    for param in ran:
        examples.test_sizes(*param.values)


def test_every_helper_is_described() -> None:
    assert [name for name in colossalai.testing.__all__ if f"`{name}" not in PAGE] == []
