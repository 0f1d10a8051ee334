"""What modules and their objects are, put back after code has run that changes it."""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

DEPTH = 4  # of objects in objects that are kept
_MANY = 10_000  # a container with more entries, such as a data set, is kept, and these are not looked into

_CONTAINERS = (dict, list, set, deque)
_FOREIGN = (sys.stdlib_module_names | {"torch", "numpy", "colossalai"}) - {"__main__"}
"""Packages whose objects are left alone: threads, locks, streams, meshes, groups of processes."""
_SHARED = {
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "queue",
    "socket",
    "io",
    "logging",
    "enum",
}
"""Where a class comes from that other threads, or all of a program, know."""


class KeptAttributes:
    """The attributes of modules, and what lies in the lists, dicts, sets and plain objects that they hold.

    All of them: code may keep in one that it has put something into another, such as hooks that it gives to
    its modules in their first forward pass.  Modules that are held are only kept if they are given, too.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        """Containers and the attributes of objects, with what was in them."""
        self._seen: set[int] = set()
        for holder in holders:
            if isinstance(holder, nn.Module):
                self._keep(vars(holder), DEPTH + 1)  # lists and dicts in it are one deeper
            else:
                self._look(holder, DEPTH + 1)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that were held, each once."""
        found: dict[int, Tensor] = {}
        for _, content in self._kept:
            for value in _values(content):
                found |= {id(tensor): tensor for tensor in _tensors(value)}
        return list(found.values())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put ``function(tensor)`` into the place of each tensor that was held, until ``restore``."""
        for container, content in self._kept:
            if any(True for value in _values(content) for _ in _tensors(value)):
                if isinstance(content, dict):
                    _write(container, {key: _mapped(function, value) for key, value in content.items()})
                else:
                    _write(container, [_mapped(function, value) for value in content])

    def restore(self) -> None:
        """Make the modules and objects what they were when this was made."""
        for container, content in self._kept:
            if not _is_same(_read(container), content):
                _write(container, content)

    def _look(self, value: Any, depth: int) -> None:
        """Keep ``value``, and what is in it, if code may change it."""
        if isinstance(value, _CONTAINERS):
            self._keep(value, depth)
        elif isinstance(value, tuple):
            for entry in value if depth and len(value) <= _MANY else ():
                self._look(entry, depth - 1)
        elif isinstance(value, MethodType):
            self._look(value.__self__, depth)
        if _is_plain(value):
            if isinstance(own := getattr(value, "__dict__", None), dict):
                self._keep(own, depth)
            if slots := _Slots.of(value):
                self._keep(slots, depth, id(value))

    def _keep(self, container: Any, depth: int, key: int | None = None) -> None:
        key = id(container) if key is None else key
        if not depth or key in self._seen:
            return
        self._seen.add(key)
        content = _read(container)
        self._kept.append((container, content))  # so it lives, and its id is its own
        if len(content) <= _MANY:
            for value in _values(content):
                if type(value) not in _ATOMS:
                    self._look(value, depth - 1)


_ATOMS = frozenset((int, float, str, bool, bytes, type(None), type, nn.Parameter, Tensor))
"""Most of what is found, and has nothing in it."""


class _Slots:
    """The attributes of an object whose class has slots."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self._owner, self._names = owner, names

    @classmethod
    def of(cls, owner: Any) -> _Slots | None:
        """Those of ``owner``, if it has any."""
        names = []
        for kind in type(owner).__mro__:
            slots = vars(kind).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else list(slots)
        names = [name for name in names if name not in ("__dict__", "__weakref__")]
        return cls(owner, names) if names else None

    def read(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def write(self, content: dict[str, Any]) -> None:
        for name in self._names:
            if name in content:
                object.__setattr__(self._owner, name, content[name])  # it may be frozen
            elif hasattr(self._owner, name):
                object.__delattr__(self._owner, name)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is an object of a class that someone wrote for a model."""
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return True
    if isinstance(value, (type, ModuleType, nn.Module, Tensor)):
        return False
    roots = [str(kind.__module__).partition(".")[0] for kind in type(value).__mro__]
    return roots[0] not in _FOREIGN and _SHARED.isdisjoint(roots)


def _read(container: Any) -> Any:
    if isinstance(container, _Slots):
        return container.read()
    return dict(container) if isinstance(container, dict) else list(container)


def _write(container: Any, content: Any) -> None:
    """Make ``content`` what is in ``container``, past methods that its class may have in their place."""
    if isinstance(container, _Slots):
        container.write(content)
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        base: Any = deque if isinstance(container, deque) else list
        base.clear(container)
        base.extend(container, content)


def _is_same(now: Any, before: Any) -> bool:
    """Whether both hold the same objects, without asking these."""
    if len(now) != len(before):
        return False
    same = all(mine is theirs for mine, theirs in zip(_values(now), _values(before), strict=True))
    if same and isinstance(now, dict):
        return all(mine is theirs or mine == theirs for mine, theirs in zip(now, before, strict=True))
    return same


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that ``value`` is, or that lie in it if it cannot be changed."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) and len(value) <= _MANY:
        for entry in value:
            yield from _tensors(entry)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if not isinstance(value, tuple) or next(_tensors(value), None) is None:
        return value
    made = [_mapped(function, entry) for entry in value]
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


@contextmanager
def attributes_kept(holder: Any) -> Iterator[None]:
    """After the block, a module and all in it, or an object, is what it was before."""
    kept = KeptAttributes(holder.modules() if isinstance(holder, nn.Module) else [holder])
    try:
        yield
    finally:
        kept.restore()
