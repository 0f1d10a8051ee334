"""How a model is cut in depth: what comes before its blocks, the blocks, and what comes after them.

A policy says it in one row (``Depth``), so that a new architecture is a new row.  Nothing is said about masks, rotations or
positions: every stage runs the model's own forward, which computes them from the batch.  Only the hidden states travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Depth:
    """Paths from the module that holds both: the list of blocks, and the modules that make the first hidden states.

    A block takes the hidden states as its first argument and returns them alone, and the next block takes them as they are.  Modules of ``entry`` that a model does not
    have, or has as None, are passed over.  What is neither of both is the tail: norms and heads.
    """

    blocks: str
    entry: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """The parts of one model, by the paths of its modules."""

    entry: tuple[str, ...]
    blocks: str
    count: int
    tail: tuple[str, ...]

    def block(self, index: int) -> str:
        return f"{self.blocks}.{index}"

    def owner(self, name: str) -> int:
        """Where the parameter ``name`` belongs: -1 is the entry, ``count`` the tail, another number the block."""
        if _inside(name, self.blocks):
            return int(name[len(self.blocks) + 1 :].split(".")[0])
        return -1 if any(_inside(name, path) for path in self.entry) else self.count


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def find_parts(model: nn.Module, depth: Depth) -> Parts:
    """The parts of ``model`` that ``depth`` names; refuses a model that it does not describe."""
    who = type(model).__name__
    homes = [name for name, module in model.named_modules() if _child(module, depth.blocks, nn.ModuleList)]
    if len(homes) != 1:
        found = f"{len(homes)} modules with such a list" if homes else "no such list"
        raise ValueError(
            f"{who} cannot be split: its blocks should be one nn.ModuleList at {depth.blocks!r}, and it has {found}; pass "
            "policy=Policy(..., depth=Depth(blocks=..., entry=...)) that names it"
        )
    home = model.get_submodule(homes[0])
    prefix = f"{homes[0]}." if homes[0] else ""
    entry = tuple(prefix + path for path in depth.entry if _child(home, path, nn.Module))
    blocks = prefix + depth.blocks
    count = len(home.get_submodule(depth.blocks)._modules)
    kept = (blocks, *entry)
    for name, _ in model.named_parameters():
        parent = name.rpartition(".")[0]
        if any(path.startswith(f"{parent}.") or not parent for path in kept) and parent not in kept:
            raise ValueError(
                f"{who} cannot be split: its parameter {name!r} belongs to a module that all stages hold; move it into "
                "a module of its own"
            )
    return Parts(entry, blocks, count, tuple(_tail(model, kept)))


def _child(module: nn.Module, path: str, kind: type[nn.Module]) -> bool:
    for part in path.split("."):
        if part not in module._modules or module._modules[part] is None:
            return False
        module = module.get_submodule(part)
    return isinstance(module, kind)


def _tail(module: nn.Module, kept: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    """The outermost modules with tensors of their own that are neither blocks nor entry."""
    for name, child in module.named_children():
        path = prefix + name
        if path in kept:
            continue
        if any(k.startswith(f"{path}.") for k in kept):
            yield from _tail(child, kept, f"{path}.")
        elif any(True for _ in child.state_dict()):
            yield path


def carried_depth(model: nn.Module) -> Depth | None:
    """What the config of ``model`` itself says of its stages (``base_model_pp_plan`` of transformers), if it does."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model", model)
    entry: list[str] = []
    for path in plan:
        if _child(base, path, nn.ModuleList):
            return Depth(path, tuple(entry))
        entry.append(path)
    return None
