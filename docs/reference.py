"""The pages of the reference, made from the code: one for each part of the package, an entry for each name.

Names are those that packages export (``__all__``) and those of the compatibility list of the tests.
A name that several modules export has one entry, which tells the others.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import colossalai
import energonai
import titans
from tests.documents.api_names import SECTIONS

Names = dict[str, list[str]]  # the name of an entry, and the other names of the same object


@functools.cache
def names() -> dict[str, Names]:
    """All public names, by the part of the package that has them."""
    parts: dict[str, Names] = {}
    entries: dict[int, tuple[Names, str]] = {}
    for module, name in sorted(set(_all_names()), key=_nearest_first):
        found = getattr(importlib.import_module(module), name, None)
        if found is None or inspect.ismodule(found):
            continue
        known = entries.get(id(found)) if callable(found) else None
        full = f"{module}.{name}"
        if known and known[1].rpartition(".")[2] == name:
            known[0][known[1]].append(full)
            continue
        part = parts.setdefault(_part(module), {})
        part[full] = []
        entries[id(found)] = (part, full)
    return parts


def _nearest_first(place: tuple[str, str]) -> tuple[int, str, str]:
    module, name = place
    return module.count("."), module, name


def _part(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("colossalai") else 1])


def _all_names() -> Iterator[tuple[str, str]]:
    for package in (colossalai, energonai, titans):
        yield from _exported(package)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if any(part.startswith("_") for part in found.name.split(".")):
                continue
            if found.ispkg:
                yield from _exported(importlib.import_module(found.name))
            elif package is titans:
                yield from _defined(importlib.import_module(found.name))
    for text in SECTIONS.values():
        yield from _promised(text)


def _exported(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name in getattr(module, "__all__", ()):
        if name != "__getattr__":
            yield module.__name__, name


def _defined(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The classes and functions of a module of titans, which scripts import from there."""
    for name, value in vars(module).items():
        if not name.startswith("_") and callable(value) and value.__module__ == module.__name__:
            yield module.__name__, name


def _promised(text: str) -> Iterator[tuple[str, str]]:
    from tests.documents.test_api_names import promises

    for promise in promises(text):
        try:
            importlib.import_module(promise.module)
        except ImportError:
            continue  # tests/documents/api_left.py tells why
        yield promise.module, promise.path[0]


@functools.cache
def pages() -> dict[str, str]:
    """The text of each page by its path."""
    parts = {f"reference/{part}.md": _page(part, entries) for part, entries in sorted(names().items())}
    return {"reference/index.md": _overview(), **parts}


def _overview() -> str:
    """All names on one page, with a link to the entry of each."""
    text = ["# Reference", "All public names, by the part of the package that has them."]
    for part, entries in sorted(names().items()):
        text.append(f"## [{part}]({part}.md) {{ #part-{part} }}")
        text.append((inspect.getdoc(importlib.import_module(part)) or "").partition("\n\n")[0])
        shown = sorted(
            (f for f in entries if not f.endswith("__")), key=lambda f: f.rpartition(".")[2].lower()
        )
        text.append(" · ".join(f"[{full.rpartition('.')[2]}]({part}.md#{full})" for full in shown))
    return "\n\n".join(filter(None, text)) + "\n"


def _page(part: str, entries: Names) -> str:
    about = inspect.getdoc(importlib.import_module(part)) or ""
    text = [f"# {part}", about if part != "colossalai" else ""]
    module = ""
    for full, others in entries.items():
        if (home := full.rpartition(".")[0]) != module:
            module = home
            text.append(f"## {module} {{ #module-{module} }}" if module != part else "")
        text.append(f"{{{{ autodoc:{full} }}}}")
        if others:
            text.append("Also " + ", ".join(f"`{name}`" for name in others) + ".")
    return "\n\n".join(filter(None, text)) + "\n"


def resolve(name: str) -> Any:
    """The object with this full name."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, words[count:], found)
    return importlib.import_module(name)


def entry(name: str) -> str:
    """What ``{{ autodoc:name }}`` stands for: signature and docstring of the object."""
    if _is_known_to_mkdocstrings(name):
        return f"::: {name}"
    return described(name)


def described(name: str) -> str:
    """Signature and docstring as they are at run time, for what reading the source does not find."""
    found = resolve(name)
    lines = [f"### `{name}` {{ #{name} }}"]
    if callable(found):
        try:
            lines.append(f"```python\n{name.rpartition('.')[2]}{inspect.signature(found)}\n```")
        except (TypeError, ValueError):
            lines.append(f"A `{type(found).__name__}`.")
    else:
        if not (shown := repr(found)).startswith("<"):  # with an address in memory
            lines.append(f"```python\n{shown if len(shown) < 300 else shown[:300] + ' ...'}\n```")
        if kind := _entry_of(type(found)):
            lines.append(f"A [`{kind.rpartition('.')[2]}`][{kind}].")
    is_plain = isinstance(found, (bool, int, float, str, list, tuple, dict, set, frozenset, type(None)))
    if not is_plain and (text := inspect.getdoc(found)):
        lines.append(text)
    return "\n\n".join(lines)


def _entry_of(kind: type) -> str | None:
    """The name under which a class has its entry."""
    known = (full for entries in names().values() for full in entries)
    called = (full for full in known if full.endswith(f".{kind.__name__}"))
    return next((full for full in called if resolve(full) is kind), None)


@functools.cache
def _loader() -> Any:
    import griffe

    loader = griffe.GriffeLoader(search_paths=["."])
    for package in ("colossalai", "energonai", "titans"):
        loader.load(package)
    loader.resolve_aliases(implicit=False, external=False)
    return loader


def _is_known_to_mkdocstrings(name: str) -> bool:
    try:
        found = _loader().modules_collection[name]
        return (found.final_target if found.is_alias else found).kind.value in ("class", "function")
    except Exception:
        return False
