"""The operands of a multi-tensor optimizer kernel: lists of tensors on one device, with one dtype per list.

The i-th entries of all lists belong to one parameter, and have its shape and strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import colossalai.kernel._compat as _compat

if TYPE_CHECKING:
    from typing_extensions import Self


SMALL = 1 << 14  # elements


@dataclass(kw_only=True)
class Lists:
    """``weights`` are what the update is computed on, in float32 (or float64).

    ``halves``, if any, are the parameters themselves in half precision: the kernel writes the new weights
    into them too. With ``tails``, the weights are the parameters themselves in bfloat16, and the tails their
    other 16 bits (see ``split``); only Adam takes them.  ``grads`` may have another dtype than the weights.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    halves: list[Tensor] = field(default_factory=list)
    tails: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Kernels run over memory by the size of the weights, and do not look at the others'.
        sizes = [w.numel() for w in self.weights]
        for name, column in vars(self).items():
            if isinstance(column, list) and column and [t.numel() for t in column] != sizes:
                raise ValueError(
                    f"the {name} of an update have {[t.numel() for t in column]} elements, the weights"
                    f" {sizes}; were they loaded from a checkpoint of another model?"
                )

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    @property
    def is_mixed(self) -> bool:
        """Whether two dtypes are at work, which torch's fused kernels do not do."""
        return bool(self.halves or self.tails) or self.grads[0].dtype != self.weights[0].dtype

    @property
    def is_dense(self) -> bool:
        """Whether each tensor covers its memory without gaps, so that a kernel may run over it as one row."""
        return all(map(covers_its_memory, self.weights))

    def full_grads(self, div_scale: float = -1.0) -> list[Tensor]:
        """The gradients in the dtype of the weights, divided by ``div_scale`` if that is positive."""
        grads = self.grads
        if grads[0].dtype != self.weights[0].dtype:
            grads = [torch.empty_like(w) for w in self.weights]
            _compat.copy_(grads, self.grads)
        return _compat.div(grads, div_scale) if div_scale > 0 else grads

    def portions(self) -> Iterator[Self]:
        """On a CPU large tensors one by one: what one operation reads is still in the cache for the next.

        Small ones stay together, because calls cost more than numbers there.
        """
        sizes = [w.numel() for w in self.weights]
        small = [i for i, size in enumerate(sizes) if size < SMALL]
        alone = [[i] for i, size in enumerate(sizes) if size >= SMALL]
        if self.device.type != "cpu" or not alone:
            yield self
            return
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {name: column for name, column in columns.items() if isinstance(column, list) and column}
        for part in [small, *alone] if small else alone:
            yield replace(self, **{name: [column[i] for i in part] for name, column in columns.items()})

    def write_halves(self) -> None:
        if self.halves:
            _compat.copy_(self.halves, self.weights)


def covers_its_memory(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def row(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, in the order in which they lie in memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))
