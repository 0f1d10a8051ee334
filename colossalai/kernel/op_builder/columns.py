"""Lists of tensors from a caller, sorted into what one call of a kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colossalai._numeric import HALF_DTYPES

Columns = dict[str, list[Tensor]]
READ_ONLY = ("grads", "halves")  # what kernels take in half precision


@torch.no_grad()
def update_(
    tensor_lists: Sequence[Sequence[Tensor]], names: Sequence[str], update: Callable[[Columns], None]
) -> None:
    """Call ``update`` for the tensors of each device and dtypes, by the names of the lists.

    Weights and states in half precision are updated in float32 and rounded.
    """
    lists = [list(tensors) for tensors in tensor_lists]
    if len(lists) != len(names) or len({len(tensors) for tensors in lists}) > 1:
        raise ValueError(
            f"a fused step needs {len(names)} lists of one length ({', '.join(names)}), got lists of"
            f" {[len(tensors) for tensors in lists]} tensors"
        )
    by_kind: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for entry in zip(*lists, strict=True):
        by_kind.setdefault(tuple((t.device, t.dtype) for t in entry), []).append(entry)
    for entries in by_kind.values():
        columns = dict(zip(names, map(list, zip(*entries, strict=True)), strict=True))
        narrow = {n: c for n, c in columns.items() if n not in READ_ONLY and c[0].dtype in HALF_DTYPES}
        wide = {n: [t.to(torch.float32) for t in c] for n, c in narrow.items()}
        update({**columns, **wide})
        for name, column in narrow.items():
            for tensor, value in zip(column, wide[name], strict=True):
                tensor.copy_(value)
