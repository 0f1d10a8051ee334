"""Who decides together that a step overflowed.

A rank that holds a part of the model sees only its own gradients.  If it alone skipped a step, the parts would no
longer belong together, so one number travels over every group that shares the model before anybody steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


def group_of(mode: ParallelMode, given: dist.ProcessGroup | None = None) -> list[dist.ProcessGroup]:
    """``given``, or the group that the launched job has for ``mode``; none if there is nobody else in it."""
    if given is None and gpc.is_initialized(mode):
        given = gpc.get_group(mode)
    return [given] if given is not None and dist.get_world_size(given) > 1 else []


def maximum_over(value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """``value``, in place, as the largest that any rank of the groups has."""
    for group in groups:
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return value
