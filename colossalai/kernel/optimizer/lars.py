"""LARS on many tensors (You et al., arXiv 1708.03888): each tensor has its own learning rate.

r = eeta |w| / (|g| + decay |w| + epsilon),  or 1 where |w| or |g| is 0,
b <- momentum b + lr r (g + decay w),  w <- w - b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import colossalai.kernel._compat as _compat
from colossalai.kernel.optimizer.lamb import choose, scale_each_
from colossalai.kernel.optimizer.lists import Lists


@dataclass(frozen=True, kw_only=True)
class LarsOptions:
    lr: float
    momentum: float
    eeta: float
    weight_decay: float
    epsilon: float


@dataclass(kw_only=True)
class LarsLists(Lists):
    buffers: list[Tensor] = field(default_factory=list)  # empty without momentum


def lars_(lists: LarsLists, options: LarsOptions) -> None:
    """One update in place."""
    way = LARS[choose(lists)]
    for part in lists.portions():
        way(part, rates(part, options), options)


def rates(lists: LarsLists, options: LarsOptions) -> Tensor:
    """lr r of the formula at the top, for all tensors at once."""
    w = torch.stack(_compat.norm(lists.weights))
    g = torch.stack(_compat.norm(lists.grads, 2, w.dtype))  # half precision would overflow
    ratio = options.eeta * w / (g + options.weight_decay * w + options.epsilon)
    return options.lr * torch.where((w > 0) & (g > 0), ratio, torch.ones_like(w))


def lars_foreach_(lists: LarsLists, rates: Tensor, options: LarsOptions) -> None:
    steps = _compat.add(lists.full_grads(), lists.weights, alpha=options.weight_decay)
    scale_each_(steps, rates)
    if lists.buffers:
        _compat.mul_(lists.buffers, options.momentum)
        _compat.add_(lists.buffers, steps)
        steps = lists.buffers
    _compat.sub_(lists.weights, steps)
    lists.write_halves()


def lars_triton_(lists: LarsLists, rates: Tensor, options: LarsOptions) -> None:
    from colossalai.kernel.optimizer import multi_tensor, triton_lamb

    with multi_tensor.on(lists.device):
        triton_lamb.lars_(lists, rates, options)


LARS: dict[str, Callable[[LarsLists, Tensor, LarsOptions], None]] = {
    "triton": lars_triton_,
    "foreach": lars_foreach_,
}
