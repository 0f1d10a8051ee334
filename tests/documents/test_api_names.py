"""Every documented name is there and takes the documented parameters, or stands in a list with a reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from colossalai.cli.app import cli
from tests.documents.api_left import DIFFERENT, MISSING, PROSE
from tests.documents.api_names import COMMANDS, SECTIONS

# Like the pages, the list is not part of the repository; where we develop, it lies beside it.
_BESIDE = [folder / "shared" / "api.md" for folder in Path(__file__).resolve().parents[3:5]]
API = next((path for path in _BESIDE if path.is_file()), None)

_SHORTHAND = {
    "WI": "weight_initializer=...",
    "BI": "bias_initializer=...",
    "PEI": "position_embed_initializer=...",
}


class Promise(NamedTuple):
    """A documented name, and its parameters as written; None where only the name is promised."""

    module: str
    path: tuple[str, ...]
    parameters: str | None

    @property
    def name(self) -> str:
        return ".".join((self.module, *self.path))


def promises(text: str) -> Iterator[Promise]:
    module, owner = "", ""
    for indent, entry in _entries(text):
        name, _, parameters = entry.partition("(")
        if indent == 0:
            module = name
            continue
        owner = name if indent == 4 else owner
        path = (name,) if indent == 4 else (owner, name)
        yield Promise(module, path, parameters[:-1] if "(" in entry else None)


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """The entries with the indents of the lines in which they begin; parentheses may go over lines."""
    unfinished = ""
    indent = 0
    for line in text.splitlines():
        if not unfinished:
            indent = len(line) - len(line.lstrip())
        for word in re.findall(r"\S+", line):
            unfinished = f"{unfinished} {word}".strip()
            if unfinished.count("(") == unfinished.count(")"):
                yield indent, unfinished
                unfinished = ""


PROMISES = [promise for text in SECTIONS.values() for promise in promises(text)]


def test_how_the_table_is_read() -> None:
    text = "a.b\n    f(x,\n        y=(1, 2)) G\n        m() n\nc\n    d\n"
    assert list(promises(text)) == [
        Promise("a.b", ("f",), "x, y=(1, 2)"),
        Promise("a.b", ("G",), None),
        Promise("a.b", ("G", "m"), ""),
        Promise("a.b", ("G", "n"), None),
        Promise("c", ("d",), None),
    ]


def find(promise: Promise) -> Any:
    """The object that ``promise`` names; raises if there is none."""
    found: Any = importlib.import_module(promise.module)
    for part in promise.path:
        found = _attribute(found, part)
    return found


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of a module, a class or, where its code says so, of the instances of a class."""
    if inspect.isclass(owner) and not hasattr(owner, name):
        for base in owner.__mro__[:-1]:
            if name in vars(base).get("__annotations__", ()):
                return None
            if re.search(rf"\bself\.{name}\b[^=\n]*=[^=]", inspect.getsource(base)):
                return None
    return getattr(owner, name)


def documented(parameters: str) -> inspect.Signature:
    for short, long in _SHORTHAND.items():
        parameters = re.sub(rf"\b{short}\b", long, parameters)
    arguments = ast.parse(f"def f({parameters}): pass").body[0].args  # type: ignore[attr-defined]
    scope: dict[str, Any] = {"math": math}
    # a parameter without a default may follow one with a default in the list; to Python it may not
    assert not arguments.posonlyargs
    exec(f"def f({ast.unparse(arguments)}): pass", scope)
    return inspect.signature(scope["f"])


def differences(wanted: inspect.Signature, got: inspect.Signature, *, bound: bool) -> list[str]:
    """What a call that is written as documented would meet."""
    ours = list(got.parameters.values())[0 if bound else 1 :]
    by_name = {p.name: p for p in ours}
    in_order = [p.name for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes = {p.kind for p in ours}
    found = []
    for place, parameter in enumerate(wanted.parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue  # what it would carry is not said
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        own = by_name.get(parameter.name)
        if own is None:
            if inspect.Parameter.VAR_KEYWORD not in takes:
                found.append(f"no {parameter.name}")
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and in_order[place : place + 1] != [own.name]:
            found.append(f"{parameter.name} is not number {place + 1}")
        if parameter.default not in (inspect.Parameter.empty, ...) and own.default != parameter.default:
            shown = "required" if own.default is own.empty else repr(own.default)
            found.append(f"{parameter.name}={shown}")
    for own in ours:
        needed = own.default is own.empty and own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD)
        if needed and own.name not in wanted.parameters:
            found.append(f"needs {own.name}")
    return found


def test_how_parameters_are_compared() -> None:
    def ours(a: int, c: int, b: int = 3, *, d: int) -> None: ...

    wanted = documented("a=1, b=2, c=..., e=0")
    expected = ["a=required", "b is not number 2", "b=3", "c is not number 3", "no e", "needs d"]
    assert differences(wanted, inspect.signature(ours), bound=True) == expected


def compare(promise: Promise) -> str:
    """How the object differs from what is promised; empty if it does not."""
    found = find(promise)
    if promise.parameters is None:
        return ""
    if not callable(found):
        return f"not callable: {type(found).__name__}"
    in_class = len(promise.path) == 2 and inspect.isfunction(found) and inspect.isclass(_owner(promise))
    bound = not in_class or isinstance(inspect.getattr_static(_owner(promise), promise.path[1]), staticmethod)
    return "; ".join(differences(documented(promise.parameters), inspect.signature(found), bound=bound))


def _owner(promise: Promise) -> Any:
    return find(Promise(promise.module, promise.path[:-1], None))


def wrong_names(section: str) -> dict[str, str]:
    """What is wrong with each documented name of ``section``, or with what the lists say about it."""
    wrong = {}
    for promise in promises(SECTIONS[section]):
        listed = any(promise.name == name or promise.name.startswith(f"{name}.") for name in MISSING)
        try:
            difference = compare(promise)
        except (ImportError, AttributeError) as error:
            if not listed:
                wrong[promise.name] = f"missing: {error}"
            continue
        if listed:
            wrong[promise.name] = "is there: take it out of MISSING"
        elif difference != DIFFERENT.get(promise.name, ("",))[0]:
            wrong[promise.name] = difference or "does not differ: take it out of DIFFERENT"
    return wrong


@pytest.mark.parametrize("section", SECTIONS)
def test_every_documented_name_is_there_or_in_the_list(section: str) -> None:
    wrong = wrong_names(section)
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def test_the_lists_stay_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MISSING, "colossalai.launch", ("issue 0", "a name that is there"))
    monkeypatch.setitem(DIFFERENT, "colossalai.initialize", ("no model", "a name that does not differ"))
    wrong = wrong_names("1.1")
    assert wrong.pop("colossalai.launch") == "is there: take it out of MISSING"
    assert wrong.pop("colossalai.initialize") == "does not differ: take it out of DIFFERENT"
    assert not wrong
    left = next(name for name in MISSING if name.startswith("colossalai.nn.parallel.layers."))
    monkeypatch.delitem(MISSING, left)
    assert [problem.split()[0] for problem in wrong_names("1.4").values()] == ["missing:"]


def test_the_lists_name_only_what_is_documented() -> None:
    names = {promise.name for promise in PROMISES}
    modules = {promise.module for promise in PROMISES}
    assert [name for name in DIFFERENT if name not in names] == []
    assert [name for name in MISSING if name not in names | modules] == []
    assert all(issue and reason for issue, reason in MISSING.values())
    assert all(reason for _, reason in DIFFERENT.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_documented_options(command: str) -> None:
    options = {opt for parameter in cli.commands[command].params for opt in parameter.opts}
    assert [option for option in COMMANDS[command] if option not in options] == []


@pytest.mark.skipif(API is None, reason=f"the list is not at {' or '.join(map(str, _BESIDE))}")
def test_the_table_has_all_words_of_the_list() -> None:
    """Each word that api.md sets as code in these sections is one of the table, or of its prose."""
    assert API is not None
    document = API.read_text()
    start, end = document.index("### 1.1 "), document.index("## 4. ")
    cli = document.index("### 1.11 "), document.index("### 1.12 ")
    text = document[start : cli[0]] + document[cli[1] : end]
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in _words(code)}
    table = {word for part in SECTIONS.values() for word in _words(part)}
    assert sorted(words - table - PROSE) == []
    assert sorted(PROSE - words) == [], "prose that the list does not have"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Za-z_]\w+", text))
