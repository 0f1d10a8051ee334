"""Nests of tensors and other values, sent to some ranks and received from others at the same time.

Each message begins with its description, so a receiver needs to know nothing, and what it does know can be
checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.pipeline.p2p import is_nccl
from colossalai.pipeline.wire import Description, as_bytes
from colossalai.utils import get_current_device


def exchange(sends: Sequence[tuple[Any, int]], sources: Sequence[int], mode: ParallelMode) -> list[Any]:
    """Send each nest to its rank, and receive one from each of ``sources``; ranks of the whole job.

    Ranks that send to each other must do so in one exchange.  Received tensors lie on the current device and
    require no gradients.
    """
    me = gpc.get_global_rank()
    kept = [Description.of(nest) for nest, target in sends if target == me]
    outgoing = [(*Description.of(nest), target) for nest, target in sends if target != me]
    cpu_group, group, device = gpc.get_cpu_group(mode), gpc.get_group(mode), get_current_device()
    assert group is not None
    # gloo refuses to send tensors of CUDA: they go through the memory of the host
    wire = device if is_nccl(group, device) else torch.device("cpu")
    words = [dist.isend(t, to, group=cpu_group) for d, _, to in outgoing for t in _announcement(d)]
    coming = [None if source == me else _announced(source, cpu_group) for source in sources]
    buffers = [
        [torch.empty(leaf.shape, dtype=leaf.dtype, device=wire) for leaf in d.leaves] if d else []
        for d in coming
    ]
    operations = [
        dist.P2POp(dist.isend, as_bytes(tensor.detach().to(wire).contiguous()), target, group)
        for _, tensors, target in outgoing
        for tensor in tensors
        if tensor.numel()
    ] + [
        dist.P2POp(dist.irecv, as_bytes(tensor), source, group)
        for source, tensors in zip(sources, buffers, strict=True)
        for tensor in tensors
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    for work in (*words, *works):
        assert work is not None
        work.wait()
    received = []
    for description, tensors in zip(coming, buffers, strict=True):
        if description is None:
            description, tensors = kept.pop(0)
        received.append(description.rebuild([t.detach().to(device) for t in tensors]))
    return received


def _announcement(description: Description) -> tuple[Tensor, Tensor]:
    text = description.to_bytes()
    return torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _announced(source: int, group: dist.ProcessGroup | None) -> Description:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, source, group=group)
    text = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.recv(text, source, group=group)
    return Description.from_bytes(bytes(text.tolist()))
