"""Adam and AdamW on many tensors:  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
w <- w - lr (m / c1) / (sqrt(v / c2) + eps),  with c = 1 - b^step, or 1 without bias correction.

Weight decay is part of g (Adam) or shrinks w beforehand (AdamW).

Five ways to compute it, chosen by `choose`:

- ``fused``: torch's own kernel, where weights and gradients have one dtype;
- ``triton``: half-precision gradients in, float32 weights and moments updated, half-precision weights out, in
  one pass and one launch, on CUDA;
- ``native``: the same on CPU, in C (see ``colossalai.kernel.native``);
- ``blocks``: the same on a CPU without a compiler, as casts around torch's kernel in blocks that stay in the
  cache;
- ``foreach``: plain PyTorch, anywhere.

Weights in bfloat16 whose other 16 bits are in ``tails`` are joined and split in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import colossalai.kernel._compat as _compat
import colossalai.kernel.native.adam as native
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions
from colossalai.kernel.optimizer.lists import row
from colossalai.kernel.optimizer.snapshot import TensorSnapshot
from colossalai.kernel.optimizer.split import join, split_
from colossalai.kernel.probe import triton_works

BLOCK = (
    1 << 18
)  # elements: 1 MiB of float32, so that a block's gradient and weights are still in L2 when used again


def adam_(lists: AdamLists, step: int, options: AdamOptions, kept: TensorSnapshot | None = None) -> None:
    """One update in place; ``step`` counts from 1.  What the tensors were before goes to ``kept``."""
    if lists.device.type == "meta":
        return  # there are no values, and the kernels of a GPU need no memory of their own
    way = choose(lists)
    if way == "native":  # which copies what it reads, in the same pass
        native.adam_native_(lists, step, options, kept)
        return
    if kept is not None:
        kept.copy([tensor for column in lists.changed for tensor in column])
    ADAM[way](lists, step, options)


def choose(lists: AdamLists) -> str:
    """The name in ``ADAM`` of the fastest way for these tensors."""
    kind = lists.device.type
    if kind not in _compat.FUSED_DEVICES or not lists.is_dense:
        return "foreach"
    if not lists.is_mixed:
        return "fused"
    if lists.weights[0].dtype != torch.float32 and not lists.tails:
        return "foreach"
    if kind == "cpu":
        return "native" if native.takes(lists) and native.native_works() else "blocks"
    return "triton" if triton_works() else "foreach"


def adam_fused_(lists: AdamLists, step: int, options: AdamOptions) -> None:
    device = lists.device
    scale = torch.full((), options.div_scale, device=device) if options.div_scale > 0 else None
    _call_fused(
        (lists.weights, lists.grads, lists.exp_avgs, lists.exp_avg_sqs),
        _step_tensor(step, options, device),
        options,
        scale,
    )


def _step_tensor(step: int, options: AdamOptions, device: torch.device) -> Tensor:
    # torch's kernel always corrects the bias, by 1 - beta ** step; at a huge step that is 1
    return torch.full((), float(step) if options.bias_correction else 1e30, device=device)


def _call_fused(
    lists: tuple[list[Tensor], ...], step: Tensor, options: AdamOptions, scale: Tensor | None = None
) -> None:
    function = _compat.fused_adamw_ if options.decoupled else _compat.fused_adam_
    function(
        *lists,
        [],
        [step] * len(lists[0]),
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )


def adam_blocks_(lists: AdamLists, step: int, options: AdamOptions) -> None:
    longest = max(w.numel() for w in lists.weights)
    buffer = torch.empty(min(BLOCK, longest), dtype=lists.exp_avgs[0].dtype)
    when = _step_tensor(step, options, lists.device)
    nothing: list[Any] = [None] * len(lists.weights)
    for *entry, half, tail in zip(
        lists.weights,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        lists.grads,
        lists.halves or nothing,
        lists.tails or nothing,
        strict=True,
    ):
        w, m, v, g = map(row, entry)
        half_row, tail_row = (None if t is None else row(t) for t in (half, tail))
        for start in range(0, w.numel(), BLOCK):
            part = slice(start, start + BLOCK)
            grad = buffer[: w[part].numel()].copy_(g[part])
            if options.div_scale > 0:
                grad /= options.div_scale
            weight = w[part] if tail_row is None else join(w[part], tail_row[part])
            _call_fused(([weight], [grad], [m[part]], [v[part]]), when, options)
            if half_row is not None:
                half_row[part].copy_(weight)
            if tail_row is not None:
                split_(weight, w[part], tail_row[part])


def adam_foreach_(lists: AdamLists, step: int, options: AdamOptions) -> None:
    if lists.tails:
        whole = [join(w, tail) for w, tail in zip(lists.weights, lists.tails, strict=True)]
        adam_foreach_(replace(lists, weights=whole, tails=[]), step, options)
        for value, w, tail in zip(whole, lists.weights, lists.tails, strict=True):
            split_(value, w, tail)
        return
    weights, grads = lists.weights, lists.full_grads(options.div_scale)
    c1, c2 = options.corrections(step)
    if options.weight_decay and options.decoupled:
        _compat.mul_(weights, 1 - options.lr * options.weight_decay)
    elif options.weight_decay:
        grads = _compat.add(grads, weights, alpha=options.weight_decay)
    _compat.lerp_(lists.exp_avgs, grads, 1 - options.beta1)
    _compat.mul_(lists.exp_avg_sqs, options.beta2)
    _compat.addcmul_(lists.exp_avg_sqs, grads, grads, 1 - options.beta2)
    denominators = _compat.sqrt(lists.exp_avg_sqs)
    _compat.div_(denominators, math.sqrt(c2))
    _compat.add_(denominators, options.eps)
    _compat.addcdiv_(weights, lists.exp_avgs, denominators, -options.lr / c1)
    lists.write_halves()


def adam_triton_(lists: AdamLists, step: int, options: AdamOptions) -> None:
    from colossalai.kernel.optimizer import (  # Triton is imported only where it is used
        multi_tensor,
        triton_adam,
    )

    with multi_tensor.on(lists.device):
        triton_adam.adam_(lists, step, options)


ADAM: dict[str, Callable[[AdamLists, int, AdamOptions], None]] = {
    "fused": adam_fused_,
    "triton": adam_triton_,
    "native": native.adam_native_,
    "blocks": adam_blocks_,
    "foreach": adam_foreach_,
}
