"""One all-reduce for many gradients.

Gradients of one dtype and device travel in flat buckets.  A bucket holds every parameter of the list, also
those without a gradient here, because another rank may have one: its shape is then the same on all ranks.
Behind the gradients it carries one flag for each, whose sum tells whether any rank had a gradient; a
parameter that no rank used stays without one, as it would in serial training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import own_grad, set_own_grad
from colossalai.mesh.gradient_norm import own_part

BUCKET_BYTES = 25 * 2**20


def bucket_allreduce(
    param_list: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    average: bool = True,
    divisor: int | None = None,
) -> None:
    """Replace the gradient of every parameter by its mean over the ranks of ``group``, or by its sum, or by
    its sum over ``divisor``.

    Every rank passes the same parameters in the same order.  ``None`` is the group of all ranks.
    """
    params = [p for p in param_list if p.requires_grad]
    for p in params:
        if (grad := own_grad(p)) is not None and grad.layout != torch.strided:
            raise TypeError(
                f"bucket_allreduce takes dense gradients, got one in layout {grad.layout} of a parameter of"
                f" shape {tuple(p.shape)}; build its layer with sparse=False"
            )
    size = dist.get_world_size(group)
    divisor = divisor or (size if average else 1)
    if size == divisor == 1:
        return
    for bucket in _buckets(params):
        _allreduce(bucket, group, divisor)


@torch.no_grad()
def share_presence(param_list: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Let a parameter without a gradient here have zeros, if any rank of ``group`` has a gradient of it.

    For ranks that hold different pieces of the parameters: what one of them has used, the serial model has
    used.  Every rank passes the same parameters in the same order.
    """
    params = [p for p in param_list if p.requires_grad]
    if not params:
        return
    missing = [own_grad(p) is None for p in params]
    used = torch.tensor([not m for m in missing], dtype=torch.uint8).to(params[0].device, non_blocking=True)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    if any(missing):  # only then are the flags read, which waits for the device
        for p, is_missing, is_used in zip(params, missing, used.tolist(), strict=True):
            if is_missing and is_used:
                set_own_grad(p, torch.zeros_like(p))


def _buckets(params: list[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in params:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    for kind in kinds.values():
        bucket: list[Tensor] = []
        filled = 0
        for p in kind:
            if bucket and filled + p.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(p)
            filled += p.nbytes
        yield bucket


@torch.no_grad()
def _allreduce(bucket: list[Tensor], group: dist.ProcessGroup | None, divisor: int) -> None:
    first = bucket[0]
    own = [own_grad(p) for p in bucket]
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(bucket, own, strict=True)]
    parts = [own_part(grad) for grad in grads]  # of a DTensor, what this rank holds of it
    present = torch.tensor([grad is not None for grad in own], dtype=first.dtype).to(
        first.device, non_blocking=True
    )
    flat = torch.cat([*(part.reshape(-1).to(first.dtype) for part in parts), present])
    flat[: -len(bucket)].div_(divisor)  # before the sum, which could overflow in fp16
    dist.all_reduce(flat, group=group)
    used = flat[-len(bucket) :]
    # the flags are read, which waits for the device, only where a gradient is missing
    used_anywhere = (used > 0).tolist() if any(grad is None for grad in own) else [True] * len(bucket)
    offset = 0
    for p, grad, part, keep in zip(bucket, grads, parts, used_anywhere, strict=True):
        if keep:
            part.copy_(flat[offset : offset + part.numel()].view_as(part))
            set_own_grad(p, grad)
        offset += part.numel()
