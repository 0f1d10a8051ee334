"""The collectives of ZeRO-1 and 2, on flat buffers; all of them return at once and are waited for later.

A buffer that is cut is reduce-scattered and gathered; one that has an owner is
reduced to it and broadcast from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import DATA_AXIS
from colossalai.mesh._compat import all_gather_single, reduce_scatter_single
from colossalai.mesh.collectives import Kind, note_transfer
from colossalai.zero.pieces import FlatLayout

Wait = Callable[[], None]


def start_reduction(
    buffer: Tensor, layout: FlatLayout, group: dist.ProcessGroup | None
) -> tuple[Tensor, Wait]:
    """Sum ``buffer`` over the ranks; returns where this rank's shard of the sum
    will be, which is empty without one.
    """
    if group is None:
        return buffer[: layout.shard], _nothing
    if layout.owner is not None:
        work = dist.reduce(buffer, group=group, group_dst=layout.owner, async_op=True)
        _note("reduce", buffer, group)
        mine = dist.get_rank(group) == layout.owner
        return buffer if mine else buffer[:0], _waiting(work, buffer)
    shard = buffer.new_empty(layout.shard)
    work = reduce_scatter_single(shard, buffer, group=group, async_op=True)
    _note("reduce_scatter", buffer, group)
    return shard, _waiting(work, buffer)


def start_gathering(buffer: Tensor, layout: FlatLayout, group: dist.ProcessGroup | None) -> Wait:
    """Let every rank have in ``buffer`` what each has in its own shard of it."""
    if group is None:
        return _nothing
    if layout.owner is not None:
        work = dist.broadcast(buffer, group=group, group_src=layout.owner, async_op=True)
        _note("broadcast", buffer, group)
        return _waiting(work, buffer)
    low, high = layout.bounds(dist.get_rank(group))
    work = all_gather_single(buffer, buffer[low:high], group=group, async_op=True)
    _note("all_gather", buffer, group)
    return _waiting(work, buffer)


def start_flags(
    flags: list[bool], group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], list[bool]]:
    """Which of ``flags`` any rank has set.  They travel by the CPU where the
    group can reach it: a GPU need not be waited for.
    """
    if group is None:
        return lambda: flags
    by_cpu = "cpu" in str(dist.get_backend_config(group))
    sent = torch.tensor(flags, dtype=torch.uint8, device="cpu" if by_cpu else device)
    work = dist.all_reduce(sent, dist.ReduceOp.MAX, group=group, async_op=True)
    _note("all_reduce", sent, group)

    def answer() -> list[bool]:
        assert work is not None
        work.wait()
        return [bool(flag) for flag in sent.tolist()]

    return answer


def _note(kind: Kind, buffer: Tensor, group: dist.ProcessGroup) -> None:
    note_transfer(kind, DATA_AXIS, dist.get_world_size(group), buffer.numel() * buffer.element_size())


def _nothing() -> None:
    pass


def _waiting(work: dist.Work | None, buffer: Tensor) -> Wait:
    alive = [buffer]  # what is being sent must live until it has arrived

    def wait() -> None:
        assert work is not None
        work.wait()
        alive.clear()

    return wait
