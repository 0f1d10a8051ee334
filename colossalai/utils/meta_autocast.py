"""Autocast on the meta device: products in half precision and losses in fp32, as CUDA's autocast does.

torch has no autocast for meta tensors, so here are its rules as kernels of a dispatch key that no device of
ours uses. They follow the state of autocast on the *CPU*, which is the one that torch's checkpoints put back
when they run a function again, and cast tensors of the meta device only. Casts of weights are kept until the
autocast block ends, as torch keeps them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

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
def autocast_on_meta() -> Iterator[None]:
    """Inside the block, ``torch.autocast`` for the CPU, for CUDA or for "meta" casts meta tensors as CUDA's
    autocast casts CUDA tensors.
    """
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    casts = _Casts()
    init = torch.autocast.__init__

    def as_on_cpu(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type in ("cuda", "meta") else device_type, *args, **kwargs)

    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        casts.clear()
        clear()

    try:
        others.fallback(torch.library.fallthrough_kernel, _KEY.name)
        for operation in _operations():
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
    """The casts of weights in an autocast block, by the weight."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def clear(self) -> None:
        self._made.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_meta or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        is_weight = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        if not is_weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        found = self._made.get(id(tensor))
        if found is None or found[0]() is not tensor:
            self._made[id(tensor)] = found = (weakref.ref(tensor), tensor.to(dtype))
        return found[1]


def _operations() -> list[Any]:
    """The operations that CUDA's autocast treats."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name == "aten::_scaled_dot_product_flash_attention":
            continue  # which is what attention becomes, after it was cast
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


def _cast_and_run(operation: Callable[..., Any], casts: _Casts, *args: Any, **kwargs: Any) -> Any:
    with torch._C._SetExcludeDispatchKeyGuard(_KEY, True):
        if not torch.is_autocast_enabled("cpu"):
            return operation(*args, **kwargs)
        dtype = _dtype(operation, args)
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, lambda t: casts.cast(t, dtype), (args, kwargs))
        return operation(*args, **kwargs)


def _dtype(operation: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """The dtype that an operation computes in, or None to leave its arguments alone."""
    name = operation.overloadpacket.__name__
    if name in _AS_IT_IS:
        return None
    if name in _FP32:
        return torch.float32
    if name in _WIDEST:
        kinds = [leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return torch.float32 if torch.float32 in kinds else None
    return torch.get_autocast_dtype("cpu")
