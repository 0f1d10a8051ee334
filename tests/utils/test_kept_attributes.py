"""What modules and their objects hold is put back."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from colossalai.utils.kept_attributes import KeptAttributes


class Pair(NamedTuple):
    one: Tensor
    other: str


@dataclass(frozen=True)
class Frozen:
    table: Tensor
    more: list[Any] = field(default_factory=list)


class Slotted:
    __slots__ = ("count", "made", "table")
    made: int

    def __init__(self) -> None:
        self.count, self.table = 0, torch.ones(2)


class Plain:
    """An object that knows itself."""

    def __init__(self) -> None:
        self.me, self.known, self.seen = self, {"pair": Pair(torch.ones(2), "x")}, {1}
        self.recent: deque[int] = deque([1], maxlen=1)
        self.slotted, self.frozen = Slotted(), Frozen(torch.ones(2))
        self.lock, self.event = threading.Lock(), threading.Event()

    def change(self) -> None:
        self.known["more"] = self.known.pop("pair")
        self.seen.add(2)
        self.recent.append(2)
        self.slotted.count, self.slotted.made = 1, 1
        self.frozen.more.append(1)
        self.later = 1
        self.event.set()


def text(plain: Plain) -> str:
    return str({name: value for name, value in vars(plain).items() if name != "event"})


def test_objects_are_put_back() -> None:
    module: Any = nn.Module()
    module.plain, module.held, module.call = Plain(), [Plain()], Plain().change
    plains = [module.plain, module.held[0], module.call.__self__]
    before = [text(plain) for plain in plains]
    kept = KeptAttributes([module])
    for plain in plains:
        plain.change()
    module.held.clear()
    kept.restore()
    for plain, known in zip(plains, before, strict=True):
        assert text(plain) == known
        assert not hasattr(plain.slotted, "made")
        assert plain.slotted.count == 0
        assert not plain.frozen.more
        assert plain.event.is_set()  # other threads know it
    assert module.held == [plains[1]]


def test_tensors_of_objects_are_others_for_a_while() -> None:
    module: Any = nn.Linear(2, 2)
    module.plain = plain = Plain()
    kept = KeptAttributes([module])
    kept.map_tensors(lambda tensor: tensor.detach().to("meta"))
    assert all(
        tensor.is_meta
        for tensor in (plain.known["pair"].one, plain.slotted.table, plain.frozen.table, module.weight)
    )
    assert plain.known["pair"].other == "x"
    assert len(kept.tensors()) == 5
    kept.restore()
    assert plain.known["pair"].one.is_cpu
    assert plain.slotted.table.is_cpu
    assert plain.frozen.table.is_cpu
    assert isinstance(module.weight, nn.Parameter)
