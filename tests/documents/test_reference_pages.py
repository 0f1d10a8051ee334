"""Pages that list something are complete: the reference, options, combinations, messages, pictures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache

import pytest

from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossalai.cli.app import cli
from docs import combinations, reference, translated_tables
from docs.pages import ENGLISH, ROOT
from tests.documents.api_left import MISSING
from tests.documents.test_api_names import PROMISES


def test_every_documented_name_has_an_entry() -> None:
    entries = {name for part in reference.names().values() for name in part}
    others = {name for part in reference.names().values() for rest in part.values() for name in rest}
    here = {promise for promise in PROMISES if len(promise.path) == 1 and promise.name not in MISSING}
    here = {promise for promise in here if promise.module not in MISSING}
    assert sorted({promise.name for promise in here} - entries - others) == []
    assert {"titans.model.gpt.GPT", "titans.loss.lm_loss.GPTLMLoss", "energonai.launch_engine"} <= entries


def test_an_entry_shows_the_arguments() -> None:
    assert "placement_policy: 'str' = 'cpu'" in reference.described("colossalai.booster.plugin.GeminiPlugin")
    assert reference.entry("colossalai.booster.Booster") == "::: colossalai.booster.Booster"
    assert "placement_policy" not in reference.described("colossalai.constants.ALLOWED_MODES")
    context = reference.described("colossalai.core.global_context")
    assert "[`ParallelContext`][colossalai.context.ParallelContext]" in context
    assert " at 0x" not in context


def test_the_overview_leads_to_every_entry() -> None:
    overview = reference.pages()["reference/index.md"]
    entries = {f"{part}.md#{name}" for part, names in reference.names().items() for name in names}
    assert [entry for entry in entries if f"({entry})" not in overview and not entry.endswith("__")] == []


def test_members_without_words_are_left_out() -> None:
    griffe = pytest.importorskip("griffe", reason="needs `pip install -r docs/requirements-doc-test.txt`")
    code = """
class Plan:
    size: int = 1
    def __init__(self):
        self.hidden = 2
        self.told = 3
        \"\"\"Words.\"\"\"
    @property
    def all(self): ...
    def apply(self, model): ...
@dataclass(frozen=True)
class Request:
    uid: int
    data: Any
class Piece:
    def __new__(cls, data): ...
"""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "griffe_members.py"))
    with griffe.temporary_visited_package(
        "plans", {"__init__.py": code}, extensions=extensions, inits=False
    ) as module:
        assert sorted(module["Plan"].members) == ["__init__", "all", "apply", "size", "told"]
        assert {"uid", "data"} <= set(module["Request"].members)  # the arguments
        assert "data" in module["Piece"].parameters


def test_every_argument_of_gemini_is_in_the_tables() -> None:
    page = (ENGLISH / "gemini_options.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, flags=re.MULTILINE))
    real = inspect.signature(GeminiPlugin).parameters
    assert {name: ast.literal_eval(shown) for name, shown in rows.items()} == {
        name: parameter.default for name, parameter in real.items()
    }


def test_every_argument_of_zero_is_in_the_table() -> None:
    page = (ENGLISH / "zero.md").read_text()
    rows = re.findall(r"^\| (`[\w`, ]+`) \| (`.*?`) \| ", page, flags=re.MULTILINE)
    shown = {
        name: ast.literal_eval(default)
        for names, defaults in rows
        for name, default in zip(re.findall(r"`(\w+)`", names), re.findall(r"`(.*?)`", defaults), strict=True)
    }
    real = inspect.signature(LowLevelZeroPlugin).parameters
    assert shown == {name: parameter.default for name, parameter in real.items()}


@pytest.mark.parametrize(("command", "name"), [("run", "command_line"), ("serve", "serving")])
def test_every_option_of_a_command_is_in_its_table(command: str, name: str) -> None:
    page = (ENGLISH / f"{name}.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    options = [parameter.opts for parameter in cli.commands[command].params if parameter.opts[0][0] == "-"]
    missing = [opts for opts in options if not any(re.search(rf"`{o}\b", row) for row in rows for o in opts)]
    assert [opts for opts in missing if "--help" not in opts] == []


@cache
def _messages() -> str:
    """All strings of the package, one per line; names in f-strings are left out."""
    found = []
    for path in (ROOT / "colossalai").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


_SEEN = ("CUDA out of memory", "OutOfCapacity", "torch.cuda.is_available()", "No module named")


def test_every_message_of_the_pages_is_one_of_the_code() -> None:
    shown = [row for page in ("troubleshooting", *_pages_of_faults()) for row in _faults(page)]
    ours = [
        part.strip() for message in shown if not message.startswith(_SEEN) for part in message.split("...")
    ]
    assert len(ours) > 30
    assert [message for message in ours if message not in _messages()] == []
    assert hasattr(importlib.import_module("colossalai.zero.gemini"), "OutOfCapacity")


def _pages_of_faults() -> list[str]:
    pages = {path.stem: path.read_text() for path in sorted(ENGLISH.rglob("*.md"))}
    return [name for name, text in pages.items() if "| you see | " in text]


def _faults(name: str) -> list[str]:
    """What stands in the first column of the tables of faults, where it is a message."""
    page = (ENGLISH / f"{name}.md").read_text()
    tables = page if name == "troubleshooting" else page[page.index("| you see | ") :].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]*)` \|", tables, flags=re.MULTILINE)


def test_the_tables_of_combinations_are_those_of_the_code() -> None:
    pytest.importorskip("transformers", reason="needs `pip install transformers`")
    page = combinations.PAGE.read_text()
    assert combinations.written(page) == page, "run `python -m docs.combinations`"


@pytest.mark.parametrize("name", translated_tables.WORDS)
def test_tables_of_chinese_pages_are_those_of_the_english_ones(name: str) -> None:
    page = (translated_tables.CHINESE / f"{name}.md").read_text()
    assert translated_tables.with_tables(name) == page, "run `python -m docs.translated_tables`"
    assert page.count("|") == (ENGLISH / f"{name}.md").read_text().count("|")


def test_pictures_are_small_and_used() -> None:
    pages = "".join(path.read_text() for path in [*ENGLISH.rglob("*.md"), ROOT / "README.md"])
    for path in (ENGLISH / "figures").glob("*.svg"):
        assert path.stat().st_size < 150_000
        assert path.name in pages or path.name == "icon.svg"
