"""Which memory operations write to, also by views whose writes the versions of tensors do not count."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def memory_of(result: Any) -> set[int]:
    """The memory of all tensors in ``result``, as numbers that are valid while they live."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {leaf.untyped_storage()._cdata for leaf in leaves if not is_traceable_wrapper_subclass(leaf)}


def memory_written(operation: Any, args: Any, kwargs: Any) -> set[int]:
    """The memory that ``operation`` writes to, if it runs with these arguments."""
    found: set[int] = set()
    if operation._schema.is_mutable:
        for place, argument in enumerate(operation._schema.arguments):
            if argument.is_write:
                found |= memory_of(args[place] if place < len(args) else (kwargs or {}).get(argument.name))
    return found


class WrittenMemory(TorchDispatchMode):
    """Inside the block, ``memory`` is what was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.memory |= memory_written(func, args, kwargs)
        return func(*args, **(kwargs or {}))
