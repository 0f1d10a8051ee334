"""Linear layers whose three matrix products are computed in fp8.

A linear layer is three products: ``y = x W^T`` going forward, ``dx = dy W`` and ``dW = dy^T x`` going back.
Their inputs are rounded to 8 bits: activations and weights to e4m3 (3 bits of mantissa), gradients to e5m2 (2
bits, and more range).  So few bits hold only numbers of similar size, so each tensor is first multiplied by
the largest power of two that keeps its largest element inside the format; the product is divided by both
factors, and is summed and returned in more bits.  The factor is found anew each time, so there is no history
to save and no overflow.

Weights, their gradients and the optimizer stay as they are; a swapped layer has
the names and the state of the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai._numeric import autocast_dtype
from colossalai.amp._compat import scaled_product
from colossalai.nn import Embedding, Linear

ModuleFilter = Callable[[str, nn.Linear], bool]

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
MULTIPLE = 16  # the products need sizes that are multiples of this
CAPABILITY = (8, 9)  # of the GPU: Ada, Hopper and newer
HEADS = {"head", "heads", "lm_head", "classifier", "score"}


def quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``tensor`` in fp8, and the factor that takes it back: ``tensor`` is about ``quantized * factor``."""
    largest = torch.linalg.vector_norm(tensor.detach(), float("inf"), dtype=torch.float32).clamp(min=1e-12)
    limit = torch.finfo(dtype).max
    power = torch.log2(
        limit / largest
    ).floor()  # a power of two is exact in bf16 too, and costs no bit of mantissa
    # a value that is rounded beyond the limit would become nan
    return (tensor * torch.exp2(power)).clamp(-limit, limit).to(dtype), torch.exp2(-power)


def _columns(matrix: Tensor) -> Tensor:
    """The same matrix, laid out column by column, as the second factor of a product must be."""
    return matrix.t().contiguous().t()


class _Product(torch.autograd.Function):
    """``x W^T + bias`` for ``x`` with a multiple of 16 rows; the result is of ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x8, x_factor = quantize(x, FORWARD)
        w8, w_factor = quantize(weight, FORWARD)
        ctx.save_for_backward(x8, x_factor, w8, w_factor)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        return scaled_product(x8, w8.t(), x_factor, w_factor, dtype, bias=bias, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x8, x_factor, w8, w_factor = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        g8, g_factor = quantize(grad, BACKWARD)
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = scaled_product(g8, _columns(w8), g_factor, w_factor, x_dtype)
        if ctx.needs_input_grad[1]:
            weight_grad = scaled_product(g8.t().contiguous(), _columns(x8), g_factor, x_factor, weight_dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = grad.sum(0, dtype=bias_dtype)
        return x_grad, weight_grad, bias_grad, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` by fp8 products, in autocast's dtype, or
    outside of it in that of ``x``.
    """
    dtype = autocast_dtype(x.device) or x.dtype
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count % MULTIPLE:  # the rows are what dW is summed over
        rows = F.pad(rows, (0, 0, 0, -count % MULTIPLE))
    out = _Product.apply(rows, weight, bias, dtype)[:count]
    return out.view(*x.shape[:-1], len(weight))


class Float8Linear(nn.Linear):
    """``nn.Linear`` that computes with ``fp8_linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias)


def is_no_head(name: str, linear: nn.Linear) -> bool:
    """The default choice: every layer but those in a module called ``head``,
    ``lm_head``, ``classifier`` or alike.

    What a head gets wrong goes into the loss directly, and it is one layer among many.
    """
    return HEADS.isdisjoint(name.lower().split("."))


def _is_plain_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or our own where it is one: on one rank, with the weight stored as torch does."""
    ours = isinstance(module, Linear) and module.plain and module.order == "oi" and not module.skip_bias_add
    return type(module) is nn.Linear or ours


def swap_linears(model: nn.Module, module_filter: ModuleFilter = is_no_head) -> list[str]:
    """Let the linear layers of ``model`` that ``module_filter`` takes, and fp8 can, compute in fp8.

    Returns their names.

    fp8 can take a plain ``nn.Linear`` whose sizes are multiples of 16 and whose
    weight is not an embedding's too.
    """
    linears: list[tuple[str, nn.Linear]] = [
        (name, cast(nn.Linear, m)) for name, m in model.named_modules() if _is_plain_linear(m)
    ]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | Embedding)}
    fitting = [
        (name, m)
        for name, m in linears
        if not (m.in_features % MULTIPLE or m.out_features % MULTIPLE) and id(m.weight) not in embeddings
    ]
    chosen = [(name, m) for name, m in fitting if module_filter(name, m)]
    if not chosen:
        raise ValueError(
            f"fp8 finds nothing to do in {type(model).__name__}: of its {len(linears)} nn.Linear layers,"
            f" {len(fitting)} have sizes that are multiples of {MULTIPLE} and are not tied to an embedding,"
            " and the filter takes none of them"
        )
    for _, linear in chosen:
        linear.__class__ = Float8Linear  # the object, its parameters and its hooks stay
    return [name for name, _ in chosen]


def check_device(device: torch.device) -> None:
    """Refuse a device without fp8 products."""
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if have is None or have < CAPABILITY:
        what = (
            "the model is on the CPU"
            if have is None
            else f"{torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}"
        )
        raise RuntimeError(
            f"the mixed precision 'fp8' needs a GPU with fp8 matrix products (NVIDIA, compute capability"
            f" {CAPABILITY[0]}.{CAPABILITY[1]} or more: Ada, Hopper, Blackwell); {what}. Use 'bf16' here"
        )
