"""SGD on many tensors, as torch defines it: b <- momentum b + (1 - dampening) g (b = g at first), then
w <- w - lr b,  or with nesterov  w <- w - lr (g + momentum b).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from colossalai.kernel import _compat
from colossalai.kernel.optimizer.lists import Lists


@dataclass(frozen=True, kw_only=True)
class SgdOptions:
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    decay_after_momentum: bool


@dataclass(kw_only=True)
class SgdLists(Lists):
    buffers: list[Tensor] = field(default_factory=list)  # empty without momentum
    is_first: bool = False  # the buffers hold nothing yet


def sgd_(lists: SgdLists, options: SgdOptions) -> None:
    """One update in place."""
    SGD[choose(lists)](lists, options)


def choose(lists: SgdLists) -> str:
    return "fused" if lists.device.type in _compat.FUSED_DEVICES and lists.is_dense else "foreach"


def _decay(lists: SgdLists, options: SgdOptions) -> float:
    """The weight decay left for the gradient, after what comes after the momentum has been done.

    lr (d + decay w) with a d that does not depend on w: then w may shrink first.
    """
    if not options.decay_after_momentum:
        return options.weight_decay
    if options.weight_decay:
        _compat.mul_(lists.weights, 1 - options.lr * options.weight_decay)
    return 0.0


def sgd_fused_(lists: SgdLists, options: SgdOptions) -> None:
    _compat.fused_sgd_(
        lists.weights,
        lists.full_grads(),
        lists.buffers,
        weight_decay=_decay(lists, options),
        momentum=options.momentum,
        lr=options.lr,
        dampening=options.dampening,
        nesterov=options.nesterov,
        maximize=False,
        is_first_step=lists.is_first and bool(lists.buffers),
    )
    lists.write_halves()


def sgd_foreach_(lists: SgdLists, options: SgdOptions) -> None:
    steps = lists.full_grads()
    if decay := _decay(lists, options):
        steps = _compat.add(steps, lists.weights, alpha=decay)
    if lists.buffers:
        if lists.is_first:
            _compat.copy_(lists.buffers, steps)
        else:
            _compat.mul_(lists.buffers, options.momentum)
            _compat.add_(lists.buffers, steps, alpha=1 - options.dampening)
        steps = (
            _compat.add(steps, lists.buffers, alpha=options.momentum) if options.nesterov else lists.buffers
        )
    _compat.add_(lists.weights, steps, alpha=-options.lr)
    lists.write_halves()


SGD: dict[str, Callable[[SgdLists, SgdOptions], None]] = {"fused": sgd_fused_, "foreach": sgd_foreach_}
