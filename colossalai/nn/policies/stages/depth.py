"""Cuts a model in depth: the modules before its blocks, the blocks, and the modules after them.

A policy says it in one row (``Depth``), so that a new architecture is a new row.  Nothing is said about
masks, rotations or positions: every stage runs the model's own forward, which computes them from the batch.
Only the hidden states travel, and what a block passes on beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Depth:
    """Paths from the module that holds both: the list of blocks, and the modules that make the first hidden
    states.

    A block takes the hidden states as its first argument and returns them, and the next block takes them as
    they are. Modules of ``entry`` that a model does not have, or has as None, are passed over; they may also
    lie beside a tower. What is neither of both is the tail: norms and heads.
    """

    blocks: str
    entry: tuple[str, ...]
    carries: tuple[str | None, ...] = ()
    """What a block returns after the hidden states, as the next block's argument; None for what it need not
    have.
    """
    towers: tuple[str, ...] = ()
    """The names of modules with such blocks, an encoder and then a decoder; empty if the model has one list
    of blocks.
    """
    as_tuple: bool = False
    """Whether a block returns a tuple though it carries nothing on."""
    shared: tuple[str, ...] = ()
    """Modules and parameters that every stage holds: what they make is given to all blocks, such as a bias of
    positions.
    """
    formed: tuple[str, ...] = ()
    """Modules of ``entry`` that return something else than a tensor like the hidden states; the list of
    blocks is among them if the code between blocks needs such a thing.
    """
    repeats: tuple[int, ...] = ()
    """How often each module of the list is called in a row, where a layer serves as several blocks; all
    stages hold it then.
    """
    travels: tuple[tuple[str, int], ...] = ()
    """Outputs of modules of ``entry``, by their number among all that the module returns, that go to all
    later stages beside the hidden states: what only the first stage can know, such as a mask that was drawn.
    """
    encoded: type | None = None
    """What an encoder returns, if it is not a ``BaseModelOutput``."""


@dataclass(frozen=True)
class Tower:
    """One list of blocks with what comes before and after it, by the paths of modules; its blocks have the
    ``numbers``.
    """

    path: str
    blocks: str
    numbers: range
    entry: tuple[str, ...]
    tail: tuple[str, ...]
    repeats: tuple[int, ...] = ()

    def block(self, number: int) -> str:
        place = number - self.numbers.start
        if self.repeats:
            place = [i for i, calls in enumerate(self.repeats) for _ in range(calls)][place]
        return f"{self.blocks}.{place}"


@dataclass(frozen=True)
class ModelParts:
    """The parts of one model; blocks are numbered through all of its towers."""

    towers: tuple[Tower, ...]
    tail: tuple[str, ...]
    carries: tuple[str | None, ...]
    as_tuple: bool = False
    shared: tuple[str, ...] = ()
    formed: frozenset[str] = frozenset()
    travels: tuple[tuple[str, int], ...] = ()
    encoded: type | None = None

    @property
    def repeated(self) -> list[str]:
        """Modules that are several blocks each."""
        return list(dict.fromkeys(t.block(i) for t in self.towers if t.repeats for i in t.numbers))

    def is_shared(self, name: str) -> bool:
        """Whether all stages hold the parameter ``name``."""
        return any(_inside(name, path) for path in self.shared)

    @property
    def count(self) -> int:
        return self.towers[-1].numbers.stop

    @property
    def paths(self) -> list[str]:
        """All modules that may be elsewhere."""
        towers = [
            path
            for t in self.towers
            for path in (t.path, *t.entry, *map(t.block, t.numbers), *t.tail)
            if path
        ]
        return [*towers, *self.tail]

    def owner(self, name: str) -> int:
        """The block whose stage holds the parameter ``name``; -1 is the first stage, ``count`` the last
        one.
        """
        for tower in self.towers:
            first, end = tower.numbers.start, tower.numbers.stop
            if _inside(name, tower.blocks):
                return first + int(name[len(tower.blocks) + 1 :].split(".")[0])
            if any(_inside(name, path) for path in tower.entry):
                return first or -1
            if any(_inside(name, path) for path in tower.tail):
                return end - 1
        return self.count

    def sent(self, end: int) -> tuple[str, ...]:
        """The names of what a stage sends that ends before the block ``end``."""
        tower = next(t for t in self.towers if end in t.numbers)
        encoded = ("encoder_hidden_states",) if tower is not self.towers[0] else ()
        if encoded and end == tower.numbers.start:
            return encoded
        carried = [name for name in self.carries if name] if end > tower.numbers.start else []
        return ("hidden_states", *carried, *encoded, *(travelling(*place) for place in self.travels))


def travelling(path: str, number: int) -> str:
    """The name under which an output of the module at ``path`` is sent to later stages."""
    return f"{path}[{number}]"


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def find_parts(model: nn.Module, depth: Depth, *, derived: bool = False) -> ModelParts:
    """The parts of ``model`` that ``depth`` names; refuses a model that it does not describe.

    The blocks are a ``ModuleList``, or if ``depth`` is ``derived`` from the code, perhaps a ``Sequential``.
    """
    lists = (nn.ModuleList, nn.Sequential) if derived else (nn.ModuleList,)
    homes = [name for name, module in model.named_modules() if _has(module, depth.blocks, *lists)]
    _check_homes(model, depth, homes)
    towers: list[Tower] = []
    for home in homes:
        start = towers[-1].numbers.stop if towers else 0
        towers.append(_tower(model, depth, home, start))
    shared = (*depth.shared, *(t.blocks for t in towers if t.repeats))
    kept = (*(path for t in towers for path in (t.blocks, *t.entry, *t.tail)), *depth.shared)
    _check_parameters(model, kept)
    _check_buffers(model, shared)
    tail = tuple(_rest(model, kept))
    return ModelParts(
        tuple(towers),
        tail,
        depth.carries,
        depth.as_tuple,
        shared,
        frozenset(depth.formed),
        depth.travels,
        depth.encoded,
    )


def _check_homes(model: nn.Module, depth: Depth, homes: list[str]) -> None:
    names = tuple(home.rpartition(".")[2] for home in homes)
    if names and names == depth.towers[: len(names)] if depth.towers else len(homes) == 1:
        return
    found = f"{len(homes)} modules with such a list" if homes else "no such list"
    raise ValueError(
        f"{type(model).__name__} cannot be split: its blocks should be one nn.ModuleList at {depth.blocks!r},"
        f" and it has {found}; pass policy=Policy(..., depth=Depth(blocks=..., entry=...)) that names it"
    )


def _tower(model: nn.Module, depth: Depth, home: str, start: int) -> Tower:
    prefix = f"{home}." if home else ""
    places = [prefix]
    if depth.towers and not start:
        outer = home.rpartition(".")[0]
        places.append(f"{outer}." if outer else "")
    entry = tuple(p + path for path in depth.entry for p in places if _has(model, p + path))
    blocks = prefix + depth.blocks
    count = sum(depth.repeats) or len(model.get_submodule(blocks)._modules)
    kept = (blocks, *entry)
    tail = tuple(_rest(model.get_submodule(home), kept, prefix)) if depth.towers else ()
    numbers = range(start, start + count)
    return Tower(home if depth.towers else "", blocks, numbers, entry, tail, depth.repeats)


def _check_parameters(model: nn.Module, kept: tuple[str, ...]) -> None:
    for name, _ in model.named_parameters():
        parent = name.rpartition(".")[0]
        if name in kept:
            continue
        if parent not in kept and any(not parent or path.startswith(f"{parent}.") for path in kept):
            raise ValueError(
                f"{type(model).__name__} cannot be split: its parameter {name!r} belongs to a module that all"
                " stages hold; move it into a module of its own"
            )


def _check_buffers(model: nn.Module, shared: tuple[str, ...]) -> None:
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name in model.state_dict():
        if name not in weights and any(_inside(name, path) for path in shared):
            raise ValueError(
                f"{type(model).__name__} cannot be split: every stage would hold its buffer {name!r}, and"
                " change it on its own; register it with persistent=False if it never changes"
            )


def _has(module: nn.Module, path: str, *kinds: type[nn.Module]) -> bool:
    """Whether there is a module at ``path``, of one of the ``kinds`` if any are named."""
    for part in path.split("."):
        if module._modules.get(part) is None:
            return False
        module = module.get_submodule(part)
    return not kinds or isinstance(module, kinds)


def _rest(module: nn.Module, kept: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    """The outermost modules with tensors of their own that are not ``kept``."""
    for name, child in module.named_children():
        path = prefix + name
        if path in kept:
            continue
        if any(k.startswith(f"{path}.") for k in kept):
            yield from _rest(child, kept, f"{path}.")
        elif any(True for _ in child.state_dict()):
            yield path


def carried_depth(model: nn.Module) -> Depth | None:
    """What the config of ``model`` itself says of its stages (``base_model_pp_plan`` of transformers), if it
    does.
    """
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model", model)
    entry: list[str] = []
    for path in plan:
        if _has(base, path, nn.ModuleList):
            return Depth(path, tuple(entry))
        entry.append(path)
    return None
