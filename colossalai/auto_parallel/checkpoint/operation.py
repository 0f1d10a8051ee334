"""A chain of stages, and the operations of which a schedule of its forward and backward passes consists."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chain:
    """Stages that compute one after the other, each from the output of the one before it.

    Stage i takes ``ftime[i]`` and ``btime[i]``. Its input has ``x[i]`` bytes, so ``x`` has one entry more,
    the output of the last stage; with all that its backward pass needs, its output included but not its
    input, it keeps ``xbar[i]`` bytes.  ``ftmp`` and ``btmp`` are bytes that it needs meanwhile.  A gradient
    has the bytes of what it is the gradient of.
    """

    ftime: list[float]
    btime: list[float]
    x: list[int]
    xbar: list[int]
    ftmp: list[int] = field(default_factory=list)
    btmp: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ftmp = list(self.ftmp) or [0] * len(self)
        self.btmp = list(self.btmp) or [0] * len(self)
        lengths = {name: len(getattr(self, name)) for name in ("ftime", "btime", "xbar", "ftmp", "btmp")}
        if not len(self) or set(lengths.values()) != {len(self)} or len(self.x) != len(self) + 1:
            raise ValueError(
                f"a Chain has as many of {', '.join(lengths)} as stages, at least 1, and one more of x; got"
                f" {lengths} and {len(self.x)} of x"
            )

        for name in ("ftime", "btime", "x", "xbar", "ftmp", "btmp"):
            wrong = [value for value in getattr(self, name) if not 0 <= value < float("inf")]
            if wrong:
                raise ValueError(
                    f"a Chain has times and bytes of at least 0, got {name} with {wrong[0]!r}; give the"
                    " seconds and the bytes of each stage"
                )

    def __len__(self) -> int:
        return len(self.ftime)

    @property
    def sum_time(self) -> float:
        """The time of both passes if nothing is computed twice."""
        return sum(self.ftime) + sum(self.btime)


@dataclass(frozen=True)
class ChainOperation:
    """A step of a schedule for the stage ``index``."""

    index: int

    def cost(self, chain: Chain) -> float:
        """Its time."""
        return 0.0

    def __str__(self) -> str:
        return f"{self.letter}_{self.index}"

    letter = "?"


class Forward(ChainOperation):
    """Computes the output of a stage from its input."""

    letter = "F"

    def cost(self, chain: Chain) -> float:
        return chain.ftime[self.index]


class ForwardEnable(Forward):
    """Computes a stage and keeps all that its backward pass needs."""

    letter = "Fe"


class ForwardNograd(Forward):
    """Computes a stage and keeps neither its input nor what is inside."""

    letter = "Fn"


class ForwardCheck(Forward):
    """Computes a stage and keeps its input, from which it will be computed again."""

    letter = "CF"


class Backward(ChainOperation):
    """Computes the gradient of the input of a stage."""

    letter = "B"

    def cost(self, chain: Chain) -> float:
        return chain.btime[self.index]


class Loss(ChainOperation):
    """Turns the output of the chain, ``index`` stages behind, into its gradient."""

    letter = "L"


class WriteMemory(ChainOperation):
    """Keeps the input of a stage for later."""

    letter = "WM"


class ReadMemory(ChainOperation):
    """Takes the input of a stage that was kept."""

    letter = "RM"


class DiscardMemory(ChainOperation):
    """Frees the input of a stage."""

    letter = "DM"


@dataclass(frozen=True)
class Forwards:
    """Computes the stages ``start`` to ``end`` and keeps nothing but the last output."""

    start: int
    end: int

    def cost(self, chain: Chain) -> float:
        return sum(chain.ftime[self.start : self.end + 1])

    def __str__(self) -> str:
        return f"F_{self.start}->{self.end}"


@dataclass
class Sequence:
    """Operations, and sequences of them, in their order."""

    name: str
    items: list[Any] = field(default_factory=list)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Sequence_[Any]) -> None:
        self.items.extend(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.list_operations())

    def list_operations(self) -> list[Any]:
        """All operations, those of inner sequences in their places."""
        return [op for item in self.items for op in (item if isinstance(item, Sequence) else (item,))]

    def cost(self, chain: Chain) -> float:
        return float(sum(op.cost(chain) for op in self.list_operations()))

    def __str__(self) -> str:
        return " ".join(map(str, self.list_operations()))
