"""The groups of ranks that decide together whether a step overflowed.

A rank that holds a part of the model sees only its own gradients.  If it alone skipped a step, the parts
would no longer belong together, so one number travels over every group that shares the model before any rank
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import Mesh, placement
from colossalai.mesh.parameter import own_mesh
from colossalai.mesh.rows import expert_axes
from colossalai.utils.parallel import launched_mesh, row_mode


def group_of(mode: ParallelMode, given: dist.ProcessGroup | None = None) -> list[dist.ProcessGroup]:
    """``given``, or the group that the launched job has for ``mode``; none if this rank is alone in it."""
    if given is None and gpc.is_initialized(mode):
        given = gpc.get_group(mode)
    return [given] if given is not None and dist.get_world_size(given) > 1 else []


def groups_of_experts() -> list[dist.ProcessGroup]:
    """The ranks with different tokens, if the launched plan shares experts out among them: also stages of a
    pipeline without experts decide with those that have some.
    """
    mesh = launched_mesh()
    return group_of(row_mode()) if mesh is not None and expert_axes(mesh) else []


def groups_of_pieces(
    params: Iterable[Tensor], mesh: Mesh | None, known: Sequence[dist.ProcessGroup]
) -> list[dist.ProcessGroup]:
    """The groups over which ``params`` are cut, as far as no group of ``known`` holds the same ranks."""
    cut: dict[Mesh, set[str]] = {}
    for param in params:
        if (lies_on := own_mesh(param) or mesh) is not None:
            cut.setdefault(lies_on, set()).update(placement(param).sharded)
    covered = [set(dist.get_process_group_ranks(group)) for group in known]
    return [
        lies_on.group(axis)
        for lies_on, found in cut.items()
        for axis in lies_on.in_order(tuple(found))
        if lies_on.size[axis] > 1 and not any(ranks.issuperset(lies_on.ranks(axis)) for ranks in covered)
    ]


def maximum_over(value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """``value``, in place, as the largest that any rank of the groups has."""
    for group in groups:
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return value
