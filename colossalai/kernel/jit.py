"""A bias together with what follows it in a transformer: gelu, or dropout and the residual.

After ``set_jit_fusion_options``, each is compiled into one kernel on CUDA; before it, and elsewhere, each is
a few operations of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from colossalai.kernel.probe import triton_works

_fuses = False


def set_jit_fusion_options() -> None:
    """Compile the functions of this module on CUDA from now on, when they first see tensors of a shape."""
    global _fuses
    _fuses = True


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """``gelu(input + bias)`` by its approximation with tanh."""
    return _of(_bias_gelu, input)(input, bias)


def bias_dropout_add_fused_train(x: Tensor, bias: Tensor, residual: Tensor, prob: float) -> Tensor:
    """``residual + dropout(x + bias)`` with dropout at work."""
    return _of(_bias_dropout_add, x)(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(x: Tensor, bias: Tensor, residual: Tensor, prob: float) -> Tensor:
    """``residual + x + bias``: dropout with any ``prob`` changes nothing."""
    return _of(_bias_dropout_add, x)(x, bias, residual, prob, False)


def warmup_jit_fusion(
    batch_size: int,
    hidden_size: int,
    seq_length: int = 512,
    vocab_size: int = 32768,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Run each function once, forward and backward, on tensors of these sizes, so that the first step of a
    training compiles nothing.

    The functions know no vocabulary: ``vocab_size`` is not used.  Random states stay as they are.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        shape = (seq_length, batch_size, hidden_size)
        wide = torch.rand(*shape[:2], 4 * hidden_size, dtype=dtype, device=device)
        bias = torch.rand(4 * hidden_size, dtype=dtype, device=device, requires_grad=True)
        bias_gelu_impl(wide.requires_grad_(), bias).sum().backward()
        x, residual = (torch.rand(shape, dtype=dtype, device=device) for _ in range(2))
        bias = torch.rand(hidden_size, dtype=dtype, device=device, requires_grad=True)
        for run in (bias_dropout_add_fused_train, bias_dropout_add_fused_inference):
            run(x.requires_grad_(), bias, residual.requires_grad_(), 0.1).sum().backward()


def _bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(input + bias, approximate="tanh")


def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    return residual + F.dropout(x + bias, prob, training)


def _of(function: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """``function``, compiled if it is to be."""
    return _compiled(function) if _fuses and x.is_cuda and triton_works() else function


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


__all__ = [
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_gelu_impl",
    "set_jit_fusion_options",
    "warmup_jit_fusion",
]
