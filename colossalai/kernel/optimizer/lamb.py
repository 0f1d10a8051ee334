"""LAMB on many tensors (You et al., arXiv 1904.00962): an Adam step u, as long as the tensor itself.

m <- b1 m + b3 g,  v <- b2 v + (1 - b2) g^2,  u = (m / c1) / (sqrt(v / c2) + eps) + decay w,
w <- w - lr r u  with  r = |w| / |u|,  or 1 where a norm is 0.

Norms are those of whole tensors, so there are two phases: moments and norms; then the weights.  With Triton
each is one launch that reads every number once, and u is computed twice rather than kept.  Plain PyTorch
needs a pass over memory for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import colossalai.kernel._compat as _compat
from colossalai.kernel.optimizer.lists import Lists
from colossalai.kernel.probe import triton_works


@dataclass(frozen=True, kw_only=True)
class LambOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True  # weight decay is a part of u; otherwise of g
    bias_correction: bool = True
    averaging: bool = True  # b3 is 1 - b1, or 1
    adaptive: bool = True  # use the ratio r, or 1

    def corrections(self, step: int) -> tuple[float, float]:
        """c1 and c2 of the formula at the top."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**step, 1 - self.beta2**step

    @property
    def beta3(self) -> float:
        return 1 - self.beta1 if self.averaging else 1.0


@dataclass(kw_only=True)
class LambLists(Lists):
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


def lamb_(lists: LambLists, step: int, options: LambOptions, divisor: Tensor | None = None) -> None:
    """One update in place; ``step`` counts from 1.

    Gradients are divided by ``divisor``, a number on the device.
    """
    way = LAMB[choose(lists)]
    for part in lists.portions():
        way(part, step, options, divisor)


def choose(lists: Lists) -> str:
    is_float = lists.weights[0].dtype == torch.float32
    return (
        "triton"
        if lists.device.type == "cuda" and is_float and lists.is_dense and triton_works()
        else "foreach"
    )


def ratios(weight_norms: Tensor, step_norms: Tensor) -> Tensor:
    """r of the formula at the top, for all tensors at once."""
    usable = (weight_norms > 0) & (step_norms > 0)
    return torch.where(usable, weight_norms / step_norms, torch.ones_like(weight_norms))


def scale_each_(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each tensor by its entry of ``factors``."""
    if tensors[0].device.type == "cpu":
        _compat.mul_(tensors, factors.tolist())
    else:  # numbers would have to come to the host first, and the host would wait for the device
        _compat.mul_(tensors, list(factors.unbind()))


def lamb_foreach_(lists: LambLists, step: int, options: LambOptions, divisor: Tensor | None = None) -> None:
    weights, grads = lists.weights, lists.full_grads()
    if divisor is not None:
        grads = _compat.div(grads, divisor)
    if options.weight_decay and not options.decoupled:
        grads = _compat.add(grads, weights, alpha=options.weight_decay)
    _compat.mul_(lists.exp_avgs, options.beta1)
    _compat.add_(lists.exp_avgs, grads, alpha=options.beta3)
    _compat.mul_(lists.exp_avg_sqs, options.beta2)
    _compat.addcmul_(lists.exp_avg_sqs, grads, grads, 1 - options.beta2)
    c1, c2 = options.corrections(step)
    denominators = _compat.sqrt(lists.exp_avg_sqs)
    if options.bias_correction:
        _compat.div_(denominators, math.sqrt(c2))
    _compat.add_(denominators, options.eps)
    updates = _compat.div(lists.exp_avgs, denominators)
    if options.bias_correction:
        _compat.div_(updates, c1)
    if options.weight_decay and options.decoupled:
        _compat.add_(updates, weights, alpha=options.weight_decay)
    if options.adaptive:
        norms = [torch.stack(_compat.norm(tensors)) for tensors in (weights, updates)]
        scale_each_(updates, ratios(*norms))
    _compat.add_(weights, updates, alpha=-options.lr)
    lists.write_halves()


def lamb_triton_(lists: LambLists, step: int, options: LambOptions, divisor: Tensor | None = None) -> None:
    from colossalai.kernel.optimizer import multi_tensor, triton_lamb

    with multi_tensor.on(lists.device):
        triton_lamb.lamb_(lists, step, options, divisor)


LAMB: dict[str, Callable[[LambLists, int, LambOptions, Tensor | None], None]] = {
    "triton": lamb_triton_,
    "foreach": lamb_foreach_,
}
