"""Names that differ between the torch versions we support (2.11 to 2.13), and the private ones that the core
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from torch import Tensor

from colossalai._numeric import HALF_DTYPES

# 2.13 renames them and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# inside this block no dispatch mode sees what is done
without_modes = torch.utils._python_dispatch._disable_current_modes
# inside this block a tensor of a class of its own is the plain tensor of its memory
plain_torch = torch._C.DisableTorchFunctionSubclass


def norms_of(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each tensor, in few launches; in fp32 for tensors in half precision, whose own range is too
    small.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for (_, dtype), same in by_kind.items():
        found = torch._foreach_norm(
            [tensors[i] for i in same], norm_type, dtype=torch.float32 if dtype in HALF_DTYPES else None
        )
        norms.update(zip(same, found, strict=True))
    return [norms[i] for i in range(len(tensors))]


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one number, in place and in few launches."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), same in by_kind.items():
        torch._foreach_mul_(same, factor.to(device))


def at_end_of_task(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that this thread is in is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def current_task() -> int:
    """Return the number of the backward pass that this thread is in; a nested one (reentrant checkpointing)
    has its own.
    """
    return torch._C._current_graph_task_id()
