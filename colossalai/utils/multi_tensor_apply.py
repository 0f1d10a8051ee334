"""Operations on lists of tensors, called as in Apex: ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

This is for operations that users bring along.  The optimizers of this package work on lists by themselves, with the
kernels of ``colossalai.kernel``, which need neither chunks nor a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Calls an operation with its chunk size, after a look at the lists.

    Args:
        chunk_size: how many elements a block of the operation takes.
    """

    available = True  # Apex says here whether its extension was built; nothing needs building

    def __init__(self, chunk_size: int) -> None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(
                f"MultiTensorApply needs chunk_size, a number of elements, as an int above 0; got {chunk_size!r}"
            )
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """``op`` on lists whose tensors belong together by position; ``noop_flag_buffer`` is where it notes an overflow."""
        lengths = [len(tensors) for tensors in tensor_lists]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"multi_tensor_applier needs lists of one length, got lists of {lengths} tensors"
            )
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
