"""A batch as micro-batches, and the outputs of micro-batches as that of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from colossalai.interface.nest import batch_size, lengths


def split_microbatches(data: Any, label: Any, number: int) -> list[tuple[Any, Any]]:
    """``(data, label)`` of each of ``number`` micro-batches.

    What has an item for each sample is cut: tensors and arrays whose first dim is as long as the batch, and lists that are as
    long and hold no tensors (names, say).  All else goes to every micro-batch whole.
    """
    size = count_samples(data, label)
    if size == 0 or size % number:
        raise ValueError(
            f"a batch of {size} samples cannot be cut into {number} equal micro-batches; choose a batch size that is a"
            " multiple of NUM_MICRO_BATCHES (and drop_last=True for the data loader)"
        )
    step = size // number

    def part(nest: Any, start: int) -> Any:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, Mapping):  # of a class that torch does not know, such as a tokenizer's
                return {key: part(value, start) for key, value in leaf.items()}
            return leaf[start : start + step] if _has_rows(leaf, size) else leaf

        return tree_map(cut, nest, is_leaf=lambda leaf: _has_rows(leaf, size))

    return [(part(data, start), part(label, start)) for start in range(0, size, step)]


def count_samples(data: Any, label: Any = None) -> int:
    """How many samples a batch has; refuses one whose tensors do not tell."""
    data, label = _outside_lists(data), _outside_lists(label)
    of_data, of_label = lengths(data), lengths(label)
    if len(of_label) == 1 and (own := next(iter(of_label))) in of_data:
        return own
    size = batch_size((data, label))
    votes = of_data + of_label
    rivals = [length for length in votes if length > 1 and votes[length] == votes[size]]
    if len(rivals) > 1:
        raise ValueError(
            f"the number of samples is not clear, for tensors of the batch have as many rows as this: {_rows(data, label)}."
            " A tensor for all samples has one row, or none"
        )
    return size


def _has_rows(leaf: Any, size: int) -> bool:
    """Whether ``leaf`` has one row for each of ``size`` samples."""
    if _is_listing(leaf):
        return len(leaf) == size
    shape = getattr(leaf, "shape", None)  # of a tensor, or an array of numpy
    return isinstance(shape, tuple) and shape[:1] == (size,)


def _is_listing(leaf: Any) -> bool:
    """Whether ``leaf`` may have an item for each sample, as a list of names or of objects in an image has."""
    return isinstance(leaf, list) and not any(isinstance(item, Tensor) for item in leaf)


def _outside_lists(nest: Any) -> Any:
    """``nest`` without the items of such lists: the tensors of one sample do not tell how many samples there are."""
    mapped = tree_map(lambda leaf: None if _is_listing(leaf) else leaf, nest, is_leaf=_is_listing)
    return mapped if lengths(mapped) else nest


def _rows(data: Any, label: Any) -> str:
    named = [
        f"{name}{keystr(path)} {len(leaf)}"
        for name, nest in (("data", data), ("label", label))
        for path, leaf in tree_flatten_with_path(nest)[0]
        if isinstance(leaf, Tensor) and leaf.ndim
    ]
    return ", ".join(named[:8])


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
