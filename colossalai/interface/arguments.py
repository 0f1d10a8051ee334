"""Copies back what a module writes into a list or dict argument of which it was given a copy.

Models collect auxiliary losses and hidden states so.  Casting inputs, and FSDP2's own hooks, put other
tensors into the arguments of a call, and with them other containers; what the module appends to those would
be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colossalai.interface.nest import tensors


@dataclass
class _Copy:
    """A list or dict of the caller, the one that the module got, and what was in both before the call."""

    given: Any
    passed: Any
    before: list[tuple[Any, Any]]  # values, by pairs

    @classmethod
    def of(cls, given: Any, passed: Any) -> _Copy:
        keys = given if isinstance(given, dict) else range(len(given))
        return cls(given, passed, [(given[key], passed[key]) for key in keys])

    def hand_back(self) -> list[Any]:
        """Write what is new in ``passed`` into ``given``; returns it."""
        own = {id(passed): given for given, passed in self.before}
        is_dict = isinstance(self.given, dict)
        now = list(self.passed.values() if is_dict else self.passed)
        is_as_before = [id(value) for value in now] == [id(passed) for _, passed in self.before]
        if is_as_before and (not is_dict or list(self.passed) == list(self.given)):
            return []
        if is_dict:
            values = {key: own.get(id(value), value) for key, value in self.passed.items()}
            self.given.clear()
            self.given.update(values)
        else:
            self.given[:] = [own.get(id(value), value) for value in now]
        return [value for value in now if id(value) not in own]


class Copies:
    """The lists and dicts among the arguments of a call that the module gets as copies.

    Args:
        given: the arguments of the caller.
        passed: the same nest of tuples, lists and dicts, with other tensors in it.
    """

    def __init__(self, given: Any, passed: Any) -> None:
        self._copies = list(_pairs(given, passed))

    def hand_back(self) -> list[Tensor]:
        """Write into the caller's containers what the module has written into its own; returns the new
        tensors.
        """
        return [tensor for copy in self._copies for tensor in tensors(copy.hand_back())]


def _pairs(given: Any, passed: Any) -> Iterator[_Copy]:
    if given is passed or type(given) is not type(passed):
        return
    if isinstance(given, dict):
        if given.keys() == passed.keys():
            yield _Copy.of(given, passed)
            for key, value in given.items():
                yield from _pairs(value, passed[key])
    elif isinstance(given, (list, tuple)) and len(given) == len(passed):
        if isinstance(given, list):
            yield _Copy.of(given, passed)
        for one, other in zip(given, passed, strict=True):
            yield from _pairs(one, other)
