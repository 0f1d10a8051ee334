"""``rehearse`` runs a model once on its real tensors, to see what a leaf returns that fake ones cannot pass.

Kernels of others without a rule for shapes, and code that leaves torch (numpy) are such; what is learnt is
the shapes of a leaf's outputs, and its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.utils.throughput import OperationCounter


@dataclass
class Rehearsed:
    """What a leaf returned in each of its calls, with tensors on the meta device, and its operations."""

    outputs: list[Any] = field(default_factory=list)
    operations: int = 0


def rehearse(
    model: nn.Module, args: Any, kwargs: Any, path: str, loss: Callable[..., Tensor] | None
) -> Rehearsed | None:
    """Run the model and watch the module at ``path``; None if it has no memory, or was not called.

    What the model itself raises is raised.  Its buffers and torch's random numbers stay as they are.
    """
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    if any(isinstance(t, Tensor) and t.is_meta for t in tensors):
        return None
    found = Rehearsed()
    counts: list[int] = []
    given = {key: value for key, value in kwargs.items() if loss is None or key != "loss_targets"}
    leaf = model.get_submodule(path)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), OperationCounter() as counter:

        def before(module: nn.Module, inputs: Any) -> None:
            counts.append(counter.operations)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            found.operations += counter.operations - counts.pop()
            found.outputs.append(tree_map_only(Tensor, _without_memory, output))

        hooks = [leaf.register_forward_pre_hook(before), leaf.register_forward_hook(after)]
        try:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            functional_call(model, buffers, args, given)
        finally:
            for hook in hooks:
                hook.remove()
    return found if found.outputs else None


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
