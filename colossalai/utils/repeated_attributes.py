"""Plain attributes of a module whose forward pass runs a second time: flags, counters, random generators.

A forward pass may read an attribute that it changes (``self.calls += 1``), or that the script has set for
this pass only (a condition, ``training``).  The second run finds what the first one found, and what it
changes is put back.  Tensors among the attributes are the matter of ``RepeatedBuffers``; what lies inside of
lists and other objects is left as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_OF_ANY = frozenset(vars(nn.Module()))
_TENSOR, _MISSING = object(), object()


class RepeatedAttributes:
    """The attributes of ``module`` and of all that is in it, for one first run and any number of others."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._training: list[tuple[nn.Module, bool]] = []
        self._generators: list[tuple[Any, Any]] = []

    def first_run(self) -> None:
        """Now begins the run that others repeat."""
        if self._module is None:
            return
        modules = modules_of(self._module)
        self._training = [(module, module.training) for module in modules]
        for module in modules:
            if has_own_code(module):
                own = vars(module)
                before = {
                    name: _TENSOR if isinstance(value, Tensor) else value
                    for name, value in own.items()
                    if name not in _OF_ANY
                }
                self._before.append((own, before))
                self._generators += [
                    (value, _GENERATORS[type(value)].get(value))
                    for value in before.values()
                    if type(value) in _GENERATORS
                ]

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Inside the block, attributes are what they were before the first run; afterwards, what they are."""
        now = [(own, _values(own)) for own, _ in self._before]
        training = [(module, module.training) for module, flag in self._training if module.training != flag]
        states = [
            (generator, _GENERATORS[type(generator)].get(generator)) for generator, _ in self._generators
        ]
        try:
            for (own, before), (_, values) in zip(self._before, now, strict=True):
                _put(own, before, values)
            for module, flag in training:
                module.training = not flag
            _set(self._generators)
            yield
        finally:
            for own, values in now:
                _put(own, values, _values(own))
            for module, flag in training:
                module.training = flag
            _set(states)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """All modules in ``module``, each once; ``module.modules()`` takes three times as long, which a small
    block notices.
    """
    found: dict[int, nn.Module] = {}
    _walk(module, found)
    return list(found.values())


def _walk(module: nn.Module, found: dict[int, nn.Module]) -> None:
    if id(module) not in found:
        found[id(module)] = module
        for child in module._modules.values():
            if child is not None:
                _walk(child, found)


def has_own_code(module: nn.Module) -> bool:
    """Whether ``module`` may change its attributes in a forward pass: torch's own do not."""
    kind = type(module)
    if kind not in _own_code:
        _own_code[kind] = not kind.__module__.startswith("torch.nn.modules.")
    return _own_code[kind]


_own_code: dict[type, bool] = {}


def _values(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in _OF_ANY}


def _put(own: dict[str, Any], wanted: dict[str, Any], values: dict[str, Any]) -> None:
    """Make the attributes, which are ``values``, those that are ``wanted``."""
    for name, value in wanted.items():
        if value is not _TENSOR and values.get(name, _MISSING) is not value:
            own[name] = value
    for name in values.keys() - wanted.keys():
        del own[name]


class _Access(NamedTuple):
    """How the state of a generator is read and set."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: dict[type, _Access] = {
    torch.Generator: _Access(torch.Generator.get_state, lambda generator, state: generator.set_state(state)),
    random.Random: _Access(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _Access(lambda generator: generator.bit_generator.state, _set_bits),
    np.random.RandomState: _Access(np.random.RandomState.get_state, np.random.RandomState.set_state),
}


def _set(states: list[tuple[Any, Any]]) -> None:
    for generator, state in states:
        _GENERATORS[type(generator)].set(generator, state)


@contextmanager
def generators_kept(module: nn.Module) -> Iterator[None]:
    """After the block, random generators that are attributes of modules go on as if there had been none."""
    values = (value for part in module.modules() for value in vars(part).values())
    states = [(value, _GENERATORS[type(value)].get(value)) for value in values if type(value) in _GENERATORS]
    try:
        yield
    finally:
        _set(states)
