"""A batch as micro-batches, and the outputs of micro-batches as that of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from colossalai.interface.nest import batch_size


def split_microbatches(data: Any, label: Any, number: int) -> list[tuple[Any, Any]]:
    """``(data, label)`` of each of ``number`` micro-batches.

    Tensors are cut along their first dim if that is as long as the batch; all else goes to every micro-batch whole.
    """
    size = batch_size(data) or batch_size(label)
    if size == 0 or size % number:
        raise ValueError(
            f"a batch of {size} samples cannot be cut into {number} equal micro-batches; choose a batch size that is a"
            " multiple of NUM_MICRO_BATCHES (and drop_last=True for the data loader)"
        )

    def part(nest: Any, index: int) -> Any:
        def cut(tensor: Tensor) -> Tensor:
            whole = tensor.ndim == 0 or len(tensor) != size
            return tensor if whole else tensor.narrow(0, index * (size // number), size // number)

        return tree_map_only(Tensor, cut, nest)

    return [(part(data, index), part(label, index)) for index in range(number)]


def join_outputs(outputs: list[Any]) -> Any:
    """The output of the batch; a list of the outputs if their shapes do not fit each other."""
    columns, spec = [], None
    for output in outputs:
        leaves, own = tree_flatten(output)
        if spec is not None and own != spec:
            return outputs
        spec = own
        columns.append(leaves)
    assert spec is not None, "there is at least one micro-batch"
    joined = []
    for parts in zip(*columns, strict=True):
        if not all(isinstance(part, Tensor) for part in parts):
            joined.append(parts[0])
        elif parts[0].ndim == 0:
            joined.append(torch.stack(parts))
        elif len({part.shape[1:] for part in parts}) > 1:
            return outputs
        else:
            joined.append(torch.cat(parts))
    return tree_unflatten(joined, spec)
