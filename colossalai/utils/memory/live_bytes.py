"""Counts the bytes of live tensors, now and at the worst moment: the statistics of a GPU, for the CPU.

Every operation passes its results through a dispatch mode; a storage counts from its first sight until torch
frees it. Views share a storage and count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from colossalai._numeric import round_up


class LiveBytes(TorchDispatchMode):
    """Inside ``with``, ``now`` and ``peak`` follow the live tensors that were made there, or given to
    ``hold``.

    Args:
        meta: count tensors of the meta device, as if they had memory, and no others.
        host: count those of the CPU, too.
        block: memory is given out in multiples of so many bytes.
    """

    def __init__(self, *, meta: bool = False, host: bool = False, block: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._meta, self._host, self._block = meta, host, block
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before, such as parameters."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.hold(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _count(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            return  # a DTensor has no memory but that of its piece, which is counted
        if tensor.is_meta != self._meta and not (tensor.is_cpu and self._host):
            return
        if tensor.layout != torch.strided:
            self.hold(_parts_of(tensor))
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = round_up(storage.nbytes(), self._block)

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            self._storages.pop(key, None)
            self.now -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in which a sparse one lies: where its values are, and the values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # memory of another library, which torch does not show


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor, also of a sparse one."""
    return tensor.nbytes if tensor.layout == torch.strided else sum(t.nbytes for t in _parts_of(tensor))
