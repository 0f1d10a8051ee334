"""Steps of optimizers on lists of tensors, with the arguments of Apex.

Each begins with a chunk size, which nothing here needs, a flag, and lists whose tensors belong together by
position.  A step is left out where the flag is not 0; ``multi_tensor_scale`` sets it.  Looking at the flag
makes the host wait for a GPU: ``colossalai.nn.optimizer`` does without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import colossalai.kernel._compat as _compat
from colossalai.kernel.op_builder.columns import Columns, update_
from colossalai.kernel.optimizer.adam import adam_
from colossalai.kernel.optimizer.adam_lists import AdamLists, AdamOptions
from colossalai.kernel.optimizer.lamb import LambLists, LambOptions, lamb_
from colossalai.kernel.optimizer.sgd import SgdLists, SgdOptions, sgd_

TensorLists = Sequence[Sequence[Tensor]]
MOMENTS = ("grads", "weights", "exp_avgs", "exp_avg_sqs")
SGD = ("grads", "weights", "buffers", "halves")
DECOUPLED = 1  # of ``mode``: weight decay apart from the gradient; 0: as a part of it


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    div_scale: float = -1.0,
) -> None:
    """Adam of gradients, weights, first and second moments; ``mode`` 1 is AdamW."""
    if noop_flag.any():
        return
    options = AdamOptions(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=_is_decoupled(mode),
        bias_correction=bool(bias_correction),
        div_scale=div_scale,
    )
    update_(tensor_lists, MOMENTS, lambda columns: adam_(AdamLists(**columns), step, options))


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """SGD of gradients, weights and momenta, and maybe half-precision copies of the weights, which are
    written too.  Gradients are multiplied by ``scale``; ``first_run``: the momenta hold nothing yet.
    """
    if noop_flag.any():
        return
    options = SgdOptions(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        decay_after_momentum=wd_after_momentum,
    )

    def update(columns: Columns) -> None:
        if scale != 1:
            columns["grads"] = [grad * scale for grad in columns["grads"]]
        buffers = columns.pop("buffers")
        lists = SgdLists(**columns, buffers=buffers if momentum else [], is_first=first_run)
        sgd_(lists, options)

    update_(tensor_lists, SGD[: max(3, len(tensor_lists))], update)


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor | float,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """LAMB of gradients, weights, first and second moments.

    Gradients are clipped as those of a model whose gradients have ``global_grad_norm``; a ``max_grad_norm``
    of 0 clips nothing.
    """
    if noop_flag.any():
        return
    options = LambOptions(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=_is_decoupled(mode),
        bias_correction=bool(bias_correction),
        averaging=bool(grad_averaging),
        adaptive=use_nvlamb or weight_decay != 0,
    )

    def update(columns: Columns) -> None:
        lists = LambLists(**columns)
        norm = torch.as_tensor(global_grad_norm, dtype=torch.float32, device=lists.device).reshape(())
        divisor = torch.clamp(norm / max_grad_norm, min=1.0) if max_grad_norm > 0 else None
        lamb_(lists, step, options, divisor)

    update_(tensor_lists, MOMENTS, update)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write the first list times ``scale`` to the second; the flag becomes 1 if a number is inf or nan."""
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        torch.mul(source, scale, out=target) if source.dtype == target.dtype else target.copy_(source * scale)
        noop_flag.masked_fill_((~target.isfinite().all()).to(noop_flag.device), 1)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors of the one list, and the norm of each, or nothing."""
    (tensors,) = tensor_lists
    norms = torch.stack([norm.reshape(()) for norm in _compat.norm(list(tensors), 2, torch.float32)])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms.new_empty(0)


def _is_decoupled(mode: int) -> bool:
    if mode not in (0, DECOUPLED):
        raise ValueError(f"mode is 0 (weight decay in the gradient) or {DECOUPLED} (apart), got {mode!r}")
    return mode == DECOUPLED
