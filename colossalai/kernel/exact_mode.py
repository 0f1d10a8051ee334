"""A mode in which unedited models compute results that do not depend on the batch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.kernel import exact

_aten = torch.ops.aten
_active: ContextVar[bool] = ContextVar("exact results", default=False)
_paused: ContextVar[bool] = ContextVar("no exact results", default=False)


def is_exact() -> bool:
    """Whether results are computed exactly now."""
    return _active.get()


@contextmanager
def exact_operations() -> Iterator[None]:
    """Compute exactly in the block: products, attention, norms, softmax and sums along the last dim, and on
    the host functions of single numbers.

    What has no such form is refused by its name.  Gradients are torch's, of the exact results.
    """
    if is_exact():
        yield
        return
    token = _active.set(True)
    try:
        with _Functions(), _Operations():
            yield
    finally:
        _active.reset(token)


@contextmanager
def _plain() -> Iterator[None]:
    """torch's own operations in the block."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


class _Functions(TorchFunctionMode):
    """Attention, before torch chooses one of its kernels."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention and not _paused.get():
            return _scaled_dot_product_attention(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise NotImplementedError(
            f"exact attention has no dropout (dropout_p={dropout_p}): set it to 0, or call model.eval()"
        )
    if query.dim() < 4:
        whole = (t[(None,) * (4 - t.dim())] for t in (query, key, value))
        return _Attention.apply(*whole, attn_mask, is_causal, scale).view(*query.shape[:-1], value.size(-1))
    if query.dim() > 4:
        raise NotImplementedError(f"exact attention is of four dims, not of {query.dim()}")
    found: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)
    return found


class _Attention(torch.autograd.Function):
    """Exact attention forward; backward torch's attention, computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.how = causal, scale
        with _plain():
            return exact.attention(
                query, key, value, mask, causal, query.size(-1) ** -0.5 if scale is None else scale
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        causal, scale = ctx.how
        wanted = ctx.needs_input_grad[:4]
        leaves: list[Any] = [
            None if t is None else t.detach().requires_grad_(w)
            for t, w in zip((query, key, value, mask), wanted, strict=True)
        ]
        query, key, value, mask = leaves
        with _plain(), torch.enable_grad():
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                scale=scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            needed = [t for t in leaves if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(out, needed, grad))
        return (*(next(found) if w else None for w in wanted), None, None)


class _Operations(TorchDispatchMode):
    """All other operations, below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _paused.get():
            return func(*args, **kwargs)
        if (ours := OPERATIONS.get(func)) is not None:
            return ours(*args, **kwargs)
        packet = func.overloadpacket
        if packet in FUNCTIONS and isinstance(args[0], Tensor):
            return _function(func, packet, *args, **kwargs)
        if packet in REFUSED:
            raise NotImplementedError(
                f"{func} has no form whose results are independent of the batch, bit for bit: compute it"
                " outside of exact mode, or without exact=True"
            )
        if func._can_decompose() and (found := func.decompose(*args, **kwargs)) is not NotImplemented:
            return found
        return func(*args, **kwargs)


def _function(func: Any, packet: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if any(isinstance(other, Tensor) and other.dim() for other in args):
        return func(x, *args, **kwargs)  # pow with an exponent for each number
    if not func._schema.is_mutable:
        return exact.pointwise(func, x, *args, **kwargs)
    if "out" in kwargs:
        out = kwargs.pop("out")
        return out.copy_(exact.pointwise(packet, x, *args, **kwargs))
    return x.copy_(exact.pointwise(getattr(_aten, packet.__name__[:-1]), x, *args, **kwargs))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _bmm(a[None], b[None])[0]


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return exact.product(a, b) if a.is_floating_point() else torch.bmm(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _baddbmm(bias, a[None], b[None], beta=beta, alpha=alpha)[0]


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1:
        return exact.product(a, b, bias)
    found = _bmm(a, b) * alpha
    return found if beta == 0 else found + bias * beta


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a[None], b[:, None])[0, 0]


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows of experts, which lie one after the other: (rows, inner) by (experts, inner, columns)."""
    if a.dim() != 2 or b.dim() != 3 or offs is None:  # gradients of weights, which are sums over rows
        return _aten._grouped_mm(a, b, offs, bias, out_dtype)
    out = a.new_zeros(a.size(0), b.size(2), dtype=out_dtype or a.dtype)
    first = 0
    for expert, last in enumerate(offs.tolist()):
        out[first:last] = exact.product(a[None, first:last], b[expert : expert + 1], bias)[0]
        first = last
    return out


def _sum(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _is_last(x, dim) or not x.is_floating_point():
        return _aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    found = exact.row_sum(x if dtype is None else x.to(dtype), dtype)
    return found[..., None] if keepdim else found


def _mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _is_last(x, dim):
        return _aten.mean.dim(x, dim, keepdim, dtype=dtype)
    wide = x.float() if x.dtype in exact.HALVES else x
    return (_sum(wide, dim, keepdim) / x.size(-1)).to(dtype or x.dtype)


def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    if not _is_last(x, dim):
        return _aten.var.correction(x, dim, correction=correction, keepdim=keepdim)
    rest = x - _mean(x, dim, True)
    count = x.size(-1) - (1 if correction is None else correction)
    return _sum(rest * rest, dim, keepdim) / count


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if ord != 2 or not _is_last(x, dim):
        return _aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    x = x if dtype is None else x.to(dtype)
    return _sum(x * x, dim, keepdim).sqrt()


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    if not _is_last(x, dim):
        return _aten.logsumexp(x, dim, keepdim)
    top = x.amax(-1, keepdim=True)
    top = top.masked_fill(top.abs() == float("inf"), 0)
    found = exact.pointwise(torch.log, _sum(exact.pointwise(torch.exp, x - top), [-1], True)) + top
    return found if keepdim else found[..., 0]


def _softmax(x: Tensor, dim: int, half_to_float: bool, *, log: bool = False) -> Tensor:
    dtype = torch.float32 if half_to_float else x.dtype
    return exact.softmax(x.transpose(dim, -1), dtype, log=log).transpose(dim, -1)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(x, dim, half_to_float, log=True)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    empty = (x == float("-inf")).all(dim, keepdim=True)
    return exact.softmax(x.transpose(dim, -1), dtype).transpose(dim, -1).masked_fill(empty, 0)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    out, mean, root = exact.normalize(x, weight, bias, eps, width=_numel(shape), centered=True)
    return out, mean.view(rows), root.view(rows)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out, _, root = exact.normalize(x, weight, None, eps, width=_numel(shape), centered=False)
    return out, root.view(rows)


def _add(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
    """With a factor, torch rounds the sum once or twice, as it comes."""
    return _aten.add(x, y if alpha == 1 else y * alpha)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: float = 1) -> Tensor:
    product = y * z
    return x + (product if value == 1 else product * value)


def _is_last(x: Tensor, dim: Any) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    return x.dim() > 0 and x.size(-1) > 0 and dims in ([-1], [x.dim() - 1])


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _bmm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _baddbmm,
    _aten.mv.default: _mv,
    _aten.dot.default: _dot,
    _aten._grouped_mm.default: _grouped_mm,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.var.correction: _var,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.logsumexp.default: _logsumexp,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.native_layer_norm.default: _layer_norm,
    _aten._fused_rms_norm.default: _rms_norm,
    _aten.add.Tensor: _add,
    _aten.addcmul.default: _addcmul,
}

FUNCTIONS = {
    getattr(_aten, name + end)
    for name in (
        *("cos", "elu", "erf", "erfc", "exp", "exp2", "expm1", "gelu", "log", "log10", "log1p", "log2"),
        *("mish", "pow", "rsqrt", "sigmoid", "silu", "sin", "softplus", "tan", "tanh"),
    )
    for end in ("", "_")
    if hasattr(_aten, name + end)
}
"""Functions of single numbers that torch computes in vectors on the host."""

REFUSED = {
    getattr(_aten, name)
    for name in (
        "_addmm_activation",
        "_native_multi_head_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_grouped_mm",
        "_scaled_mm",
        "_thnn_fused_lstm_cell",
        "_transformer_encoder_layer_fwd",
        "addbmm",
        "addmv",
        "addr",
        "convolution",
        "mkldnn_rnn_layer",
        "native_group_norm",
    )
    if hasattr(_aten, name)
}
