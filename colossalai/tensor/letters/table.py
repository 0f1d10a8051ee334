"""``OpLetters``: which dims of the tensors of an operation belong together, as letters.

A matrix product is ``mk, kn -> mn``.  What happens when an axis of the mesh cuts the dims of one letter
follows from where the letter is:

- an operand that has it is cut there, and so is a result that has it;
- an operand that lacks it is used by every rank for other elements: state R, its gradient is a sum;
- a result that lacks it is a sum over the ranks: state P.

So one line per operation says what tensor-parallel layers, data parallelism and the search for strategies
each need to know of it.  A rule is a function of the call, since letters depend on shapes and arguments
(``view``, ``transpose``); :func:`register_letters` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Letters = tuple[str, ...]

WHOLE = ""
"""In place of a letter: a dim that may not be cut."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a call: its number among the tensors, and its shape."""

    index: int
    shape: Shape

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class OpCall:
    """A call of an operation on whole tensors.

    Args:
        name: as torch calls it, without overload: ``linear``, ``add_``.
        arguments: all arguments by their names in torch's schema, with an :class:`Operand` for each tensor.
        operands: the tensors, in the order of the arguments; lists are flattened.
        outputs: the shapes of the tensors of the result.
    """

    name: str
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[Shape, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def tensor(self, *names: str) -> Operand:
        """The first tensor among the arguments of these names."""
        found = (self.arguments.get(name) for name in names)
        return next(value for value in found if isinstance(value, Operand))


@dataclass(frozen=True)
class OpLetters:
    """The letters of an operation.

    Args:
        operands: for each operand the letter of each dim, ``""`` for one that may not be cut.
        outputs: the same for each tensor of the result.  A letter that no result has is summed.
        blocks: for dims that hold several equal blocks of their letter, one behind the other, their number;
            the key is the number of the tensor (operands first, then outputs) and the dim.
        whole: letters that may not be cut.
        bias: operands that are added after the sum, and so lie as the result does.
        sums_inside: letters over which the operation itself sums, so that its results are those of the whole
            tensor: statistics of a batch norm.
        mean: whether results that are summed are means, in which a piece counts for as much as it is of the
            whole.
        sized: whether the arguments name sizes of the result; on pieces these are the sizes of the piece.
    """

    operands: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    blocks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    bias: frozenset[int] = frozenset()
    sums_inside: frozenset[str] = frozenset()
    mean: bool = False
    sized: bool = False

    @property
    def tensors(self) -> tuple[Letters, ...]:
        return self.operands + self.outputs

    @property
    def letters(self) -> tuple[str, ...]:
        """Those that may be cut, in the order in which they appear."""
        found = dict.fromkeys(letter for tensor in self.tensors for letter in tensor)
        return tuple(letter for letter in found if letter and letter not in self.whole)

    @property
    def summed(self) -> frozenset[str]:
        """The letters that no result has."""
        kept = {letter for tensor in self.outputs for letter in tensor}
        return frozenset(letter for letter in self.letters if letter not in kept) - self.sums_inside

    def places(self, letter: str) -> Iterator[tuple[int, int]]:
        """Every dim of a letter: the number of the tensor, and of the dim."""
        for number, tensor in enumerate(self.tensors):
            for dim, found in enumerate(tensor):
                if found == letter:
                    yield number, dim


Rule = Callable[[OpCall], OpLetters | None]
_RULES: dict[str, Rule] = {}


def register_letters(*names: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of the operations of these names.

    It gets the call on whole tensors and returns its letters, or None where nothing may be cut.  Operations
    of ``torch.ops.aten`` are called as there (``linear``), others by namespace and name (``mylib::scan``).
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def has_letters(name: str) -> bool:
    """Whether there is a rule for the operation of this name."""
    return name in _RULES


def letters_of(call: OpCall) -> OpLetters | None:
    """The letters of a call; None if no rule knows it, so that it can only run on whole tensors."""
    rule = _RULES.get(call.name)
    found = None if rule is None else rule(call)
    if found is not None:
        _check(call, found)
    return found


def _check(call: OpCall, found: OpLetters) -> None:
    shapes = (*(operand.shape for operand in call.operands), *call.outputs)
    if [len(tensor) for tensor in found.tensors] != [len(shape) for shape in shapes]:
        raise ValueError(
            f"the letters of {call.name!r} are {found.operands} -> {found.outputs}, and its tensors have the"
            f" shapes {shapes}: expected a letter for every dim of every operand and result"
        )
