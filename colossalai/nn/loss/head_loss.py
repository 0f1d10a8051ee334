"""The cross entropy of a linear head, whose scores never exist as a whole.

Scores of a language model are (tokens, words): its largest tensor, which the backward pass needs a second
time as its gradient. Here they are made for a slab of rows at a time, and so is the gradient, at once: what
waits for the backward pass are the gradients of the head's input and weight, which are small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai._numeric import autocast_dtype, ceil_div

# Scores that exist at a time. A compiler fuses what follows the product, and writes every slab out in its
# code: fewer and larger ones.
_SCORES, _COMPILED_SCORES = 1 << 25, 1 << 27
# Rows that are summed in fp16: gradients of rows are at most 1, so features up to 64 stay below its maximum.
_HALF_ROWS = 1024


def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The sum of the losses of all rows of ``hidden`` (rows, features), at least in fp32.

    ``targets`` (rows,) are classes, or negative where a row does not count.
    """
    if (dtype := autocast_dtype(hidden.device)) is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    total: Tensor = _HeadLoss.apply(hidden, weight, bias, targets)
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        most = _COMPILED_SCORES if torch.compiler.is_compiling() else _SCORES
        slabs = max(1, ceil_div(len(hidden) * len(weight), most))
        step = max(1, ceil_div(len(hidden), slabs))
        step = min(step, _HALF_ROWS) if hidden.dtype == torch.float16 else step
        total = hidden.new_zeros((), dtype=wide)
        of_weight = weight.new_zeros(weight.shape, dtype=wide)
        of_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        of_hidden = [hidden.new_zeros((0, hidden.size(1)))]
        classes = torch.arange(len(weight), device=hidden.device)
        for start in range(0, len(hidden), step):
            rows, target = hidden[start : start + step], targets[start : start + step, None]
            scores = F.linear(rows, weight, bias).to(wide)
            norm, chosen = scores.logsumexp(-1, keepdim=True), classes == target
            total = total + ((norm - scores) * chosen).sum()
            grad = ((scores - norm).exp() - chosen.to(wide)) * (target >= 0)
            if of_bias is not None:
                of_bias = of_bias + grad.sum(0)
            narrow = grad.to(hidden.dtype)
            of_hidden.append(narrow @ weight)
            of_weight = of_weight + narrow.t() @ rows
        ctx.save_for_backward(torch.cat(of_hidden), of_weight, of_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass with create_graph=True goes through a loss whose scores were not kept"
                " (chunk_causal_loss(whole_scores=False)), whose gradient has no gradient; leave it out"
            )
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # multiplied in fp32: in fp16 the gradient of a mean would be too small before it is scaled
        return (
            (of_hidden.to(grad.dtype) * grad).to(of_hidden.dtype),
            (of_weight * grad).to(weight_dtype),
            None if of_bias is None else (of_bias * grad).to(bias_dtype),
            None,
        )
