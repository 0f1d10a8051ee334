"""Random numbers for tensors that are cut: those of the whole tensor, of which each rank keeps its piece.

So the values do not depend on the number of ranks, and the generators of the tp ranks, which must agree for whole tensors,
stay in step.  The price is that every rank draws numbers for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.mesh import shard
from colossalai.tensor.colo_tensor import ColoTensor, cut_dim, on_wholes, wrap
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece, plain_torch


def _fill(func: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that give their first argument, or the one called ``tensor``, new values that depend on its size."""

    def implementation(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("tensor")
        if cut_dim(target) is None:
            return on_wholes(func, args, kwargs)
        assert isinstance(target, ColoTensor)
        whole = torch.empty(target.full_shape, dtype=target.dtype, device=target.device)
        if args:
            func(whole, *args[1:], **kwargs)
        else:
            func(**{**kwargs, "tensor": whole})
        with plain_torch():
            target.copy_(shard(whole, target.placement, target.process_group.mesh))
        return target

    return implementation


for _name in [
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "random_",
]:
    colo_op_impl(getattr(Tensor, _name))(_fill(getattr(Tensor, _name)))

for _name in dir(nn.init):
    if _name.endswith("_") and not _name.startswith("_"):
        colo_op_impl(getattr(nn.init, _name))(_fill(getattr(nn.init, _name)))


@colo_op_impl(nn.functional.dropout)
def _(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if cut_dim(input) is None:
        return on_wholes(nn.functional.dropout, (input, p, training, inplace), {})
    assert isinstance(input, ColoTensor)
    if not training:
        return input
    ones = torch.ones(input.full_shape, dtype=input.dtype, device=input.device)
    mask = shard(nn.functional.dropout(ones, p), input.placement, input.process_group.mesh)
    piece = as_piece(input)
    return wrap(piece.mul_(mask) if inplace else piece * mask, input.process_group, input.placement)
