"""What a call of a module left in the graph of autograd, and what of it reaches beyond the call.

[Note: outputs that change]
A hook of a tensor is a hook of the node that made it.  An operation in place on a view gives the view, and all others of the same memory,
new nodes, and the old one is in no graph any more; what stays is the node that made the memory's owner, on which the new ones build.
A linear layer with input of three dims returns a view, so ``relu_`` behind it is enough.  So the moment at which the backward pass of a call begins
is the first of: the node of one of its outputs runs, or that of the tensor it is a view of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
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


def when_known(tensor: Tensor, function: Callable[[Any], None]) -> None:
    """Call ``function`` when the gradient of what ``tensor`` is now is known."""
    node = tensor.grad_fn  # torch's register_hook does not ask for it, and reads freed memory of a view whose memory was written to
    if node is None:
        tensor.register_hook(function)
    else:
        node.register_prehook(function)


def before_backward(tensors: Iterable[Tensor], function: Callable[[Any], None]) -> None:
    """Call ``function`` before anything behind ``tensors`` has its backward pass; see [Note: outputs that change]."""
    for tensor in tensors:
        when_known(tensor, function)
        if tensor._base is not None and tensor._base.grad_fn is not None:
            when_known(tensor._base, function)


def without_weights(output: Any, chunks: Iterable[Chunk]) -> Any:
    """``output``, with copies in the place of weights and views of them: those leave before whoever gets it has computed with them."""
    wholes = {chunk.flat.untyped_storage().data_ptr() for chunk in chunks if chunk.present}
    aliases = [t for t in tensors_in(output) if t.untyped_storage().data_ptr() in wholes]
    if not aliases:
        return output
    ids = set(map(id, aliases))
    return tree_map_only(Tensor, lambda t: t.clone() if id(t) in ids else t, output)
