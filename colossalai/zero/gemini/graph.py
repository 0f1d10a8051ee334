"""What a call of a module left in the graph of autograd, and what of it reaches beyond the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.zero.gemini.chunk import Chunk

DEPTH = 4  # of objects in objects that are searched for tensors
OF_TORCH = frozenset(vars(nn.Module()))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and what else torch's trees know."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def tensors_of(values: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in ``values`` that have a backward pass, also those in dataclasses and in attributes of other objects."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                yield leaf
        elif depth and not isinstance(leaf, nn.Module | type):
            yield from tensors_of(_attributes(leaf), depth - 1)


def _attributes(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):  # may have slots
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def put_away(module: nn.Module) -> Iterator[Tensor]:
    """The tensors with a backward pass that ``module`` keeps as attributes, as losses of routers are."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.requires_grad and name not in OF_TORCH:
            yield value


def without_weights(output: Any, chunks: Iterable[Chunk]) -> Any:
    """``output``, with copies in the place of weights and views of them: those leave before whoever gets it has computed with them."""
    wholes = {chunk.flat.untyped_storage().data_ptr() for chunk in chunks if chunk.present}
    aliases = [t for t in tensors_in(output) if t.untyped_storage().data_ptr() in wholes]
    if not aliases:
        return output
    ids = set(map(id, aliases))
    return tree_map_only(Tensor, lambda t: t.clone() if id(t) in ids else t, output)
