"""``KernelCounter`` notes what the kernels of an operation do: products, bytes, and those without a rule.

Operations are counted by ``colossalai.utils.throughput.OperationCounter``; the others of torch move bytes and
compute little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.utils.throughput import OperationCounter


@dataclass(frozen=True)
class OpWork:
    """What one pass of an operation takes.

    Args:
        operations: floating-point operations of its products, convolutions and attention.
        read: bytes that its kernels read.
        written: bytes that its kernels write.
    """

    operations: int = 0
    read: int = 0
    written: int = 0

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.operations + other.operations, self.read + other.read, self.written + other.written
        )

    def __sub__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.operations - other.operations, self.read - other.read, self.written - other.written
        )


# Of torch's own operations, those that compute much, though no formula counts them.
_HEAVY = (
    "linalg_",
    "_linalg_",
    "fft_",
    "_fft_",
    "_cdist",
    "_pdist",
    "_trilinear",
    "cholesky",
    "triangular_solve",
    "ormqr",
    "geqrf",
    "lu_",
    "_ctc_loss",
    "mkldnn_rnn",
    "_cudnn_rnn",
    "miopen_rnn",
    "_int_mm",
    "_scaled_grouped_mm",
    "_weight_int",
    "_thnn_",
    "_flex_",
)


class KernelCounter(OperationCounter):
    """Counts, inside a ``with`` block, the work of all kernels, and collects those without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0
        self.without_rule: set[str] = set()

    @property
    def work(self) -> OpWork:
        return OpWork(self.operations, self.read, self.written)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        result = super()._count_flops(func_packet, out, args, kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        storages = {memory_of(t) for t in inputs}
        writes = func_packet.__name__.endswith("_")
        if not writes and all(memory_of(t) in storages for t in outputs):
            return result  # a view, or a question about a tensor
        self.read += sum(_nbytes(t) for t in inputs)
        self.written += sum(_nbytes(t) for t in outputs)
        if func_packet not in self.flop_registry and not _is_light(func_packet):
            self.without_rule.add(str(func_packet))
        return result


def _is_light(packet: Any) -> bool:
    """Whether an operation of torch does no more than read and write its tensors."""
    name = str(packet)
    if not name.startswith(("aten.", "prims.", "prim.")):
        return False
    kernel = name.split(".", 1)[1]
    return kernel == "linalg_vector_norm" or not kernel.startswith(_HEAVY)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    """What tensors have alike that share memory; some (those inside a vmap) do not tell, and share none."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def memory_bytes(tensor: Tensor) -> int:
    """The bytes of the memory of a tensor, all of which a view of it keeps alive."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return _nbytes(tensor)


__all__ = ["KernelCounter", "OpWork", "memory_bytes", "memory_of"]
