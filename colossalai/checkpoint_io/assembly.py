"""``assemble`` puts a whole tensor together from the boxes that the ranks of a group hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.checkpoint_io.boxes import Box, Shape, whole


def assemble(
    shape: Shape,
    dtype: torch.dtype,
    sources: Iterable[tuple[Box, int]],
    read: Callable[[Box], Tensor],
    group: dist.ProcessGroup | None,
    *,
    everywhere: bool = False,
) -> Tensor | None:
    """Return a tensor on the CPU of the first rank of ``group``, or of all its ranks; None on the others.

    Every rank of ``group`` must call this.  One box after the other travels.

    Args:
        sources: the boxes of the tensor, and for each the rank in ``group`` that sends it; the same on all.
        read: returns the values of a box that this rank sends.
        group: None if this process holds all boxes.
        everywhere: give the tensor to every rank, not only to the first.
    """
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    rank = 0 if group is None else dist.get_rank(group)
    keeps = everywhere or rank == 0
    room = torch.empty(shape, dtype=dtype) if keeps else None
    for box, source in sources:
        if not keeps and source != rank:
            continue
        values = read(box).detach() if source == rank else None
        if group is not None and (everywhere or source != 0):
            values = _passed_on(values, box, dtype, source, group, everywhere)
        if room is not None:
            assert values is not None
            room[box.within(whole(shape))].copy_(values)
    return room


def _passed_on(
    values: Tensor | None,
    box: Box,
    dtype: torch.dtype,
    source: int,
    group: dist.ProcessGroup,
    everywhere: bool,
) -> Tensor:
    """Send ``values``, or receive them where they are None."""
    # tensors travel on the CPU wherever the group can reach that
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) else "cuda"
    is_source = values is not None
    if values is None:
        values = torch.empty(box.sizes, dtype=dtype, device=device)
    values = values.to(device).contiguous()
    if everywhere:
        dist.broadcast(values, group=group, group_src=source)
    elif is_source:
        dist.send(values, group=group, group_dst=0)
    else:
        dist.recv(values, group=group, group_src=source)
    return values
