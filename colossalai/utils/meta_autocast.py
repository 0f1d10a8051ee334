"""Autocast on the meta device: products in half precision and losses in fp32, as the CPU or CUDA has it.

torch has no autocast for meta tensors, so here are its rules as kernels of a dispatch key that no device of
ours uses. They follow the state of autocast on the *CPU*, which is the one that torch's checkpoints put back
when they run a function again, and cast tensors of the meta device only. Casts of weights are kept until the
autocast block ends, as torch keeps them.

What the CPU's autocast casts, torch is asked (``cpu_autocast``). What CUDA's does, it could not tell where
there is no GPU; so that is written down here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colossalai.utils.cpu_autocast import casts_on_cpu

Kind = Literal["cpu", "cuda"]
_KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]

# What is not in half precision: all that torch's autocast for CUDA touches is in one of these, or cast.
_FP32_NAMES = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm group_norm rms_norm norm nuclear_norm frobenius_norm linalg_matrix_norm
    linalg_vector_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum
    sum upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_WIDEST_NAMES = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
_FP32, _WIDEST = frozenset(_FP32_NAMES.split()), frozenset(_WIDEST_NAMES.split())
_AS_IT_IS = frozenset({"binary_cross_entropy"})  # CUDA's autocast refuses it


@contextmanager
def autocast_on_meta(kind: Kind = "cuda") -> Iterator[None]:
    """Inside the block, ``torch.autocast`` for the CPU, for CUDA or for "meta" casts meta tensors as autocast
    of this ``kind`` of device casts its tensors.
    """
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    casts = _Casts(kind)
    init = torch.autocast.__init__

    def as_on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type in ("cuda", "meta") else device_type, *args, **kwargs)

    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        casts.clear()
        clear()

    try:
        others.fallback(torch.library.fallthrough_kernel, _KEY.name)
        for operation in _operations(kind):
            name = operation.name().removeprefix("aten::")
            library.impl(name, partial(_cast_and_run, operation, casts), _KEY.name)
        torch.autocast.__init__ = as_on_cpu  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear_all
        with (
            torch._C._IncludeDispatchKeyGuard(_KEY),
            torch._C._SetExcludeDispatchKeyGuard(_KEY, False),
        ):
            yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear
        library._destroy()
        others._destroy()


class _Casts:
    """What autocast casts, and the casts of weights in an autocast block, by the weight."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._made: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._known: dict[Any, dict[int, torch.dtype]] = {}

    def clear(self) -> None:
        self._made.clear()

    def apply(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments and keywords that the operation gets.

        The backward pass of the last cast comes first: so they are made in torch's order, the last argument
        first.
        """
        leaves, spec = tree_flatten((args, kwargs))
        look = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        key = (operation, torch.get_autocast_dtype("cpu"), *look)
        if key not in self._known:
            ask = casts_on_cpu if self._kind == "cpu" else _casts_on_cuda
            self._known[key] = ask(operation, args, kwargs)
        for place, dtype in self._known[key].items():
            leaves[place] = self._cast(leaves[place], dtype)
        return tree_unflatten(leaves, spec)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_meta or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        is_weight = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        if not is_weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        found = self._made.get(id(tensor))
        if found is None or found[0]() is not tensor:
            self._made[id(tensor)] = found = (weakref.ref(tensor), tensor.to(dtype))
        return found[1]


def _operations(kind: Kind = "cuda") -> list[Any]:
    """The operations that autocast of this kind of device treats."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name == "aten::_scaled_dot_product_flash_attention":
            continue  # which is what attention becomes, after it was cast
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{kind.upper()}"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


def _cast_and_run(operation: Callable[..., Any], casts: _Casts, *args: Any, **kwargs: Any) -> Any:
    with torch._C._SetExcludeDispatchKeyGuard(_KEY, True):
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = casts.apply(operation, args, kwargs)
        return operation(*args, **kwargs)


def _casts_on_cuda(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.dtype]:
    """What ``casts_on_cpu`` tells of the CPU."""
    dtype, leaves = _dtype_on_cuda(operation, args), tree_leaves((args, kwargs))
    if dtype is None:
        return {}
    return {place: dtype for place in reversed(range(len(leaves))) if isinstance(leaves[place], Tensor)}


def _dtype_on_cuda(operation: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """The dtype that an operation computes in on a GPU, or None to leave its arguments alone."""
    name = operation.overloadpacket.__name__
    if name in _AS_IT_IS:
        return None
    if name in _FP32:
        return torch.float32
    if name in _WIDEST:
        kinds = [leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return torch.float32 if torch.float32 in kinds else None
    return torch.get_autocast_dtype("cpu")
