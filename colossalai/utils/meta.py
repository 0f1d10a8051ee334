"""Training on the meta device, whose tensors have shapes and no values, with the memory that a GPU would
need.

``MetaBytes`` counts what is alive; ``gpu_kernels`` replaces what torch computes differently without a GPU by
what it does with one, autocast included (``meta_autocast``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.utils.cpu_autocast import on_cpu
from colossalai.utils.memory.live_bytes import LiveBytes
from colossalai.utils.meta_autocast import autocast_on_meta

ALLOCATOR_BLOCK = 512  # what CUDA's caching allocator rounds sizes up to


class MetaBytes(LiveBytes):
    """The bytes of the tensors on the meta device, now and at the worst moment since ``restart``.

    A number that is read from a tensor is ``read_as``, by default 0: no gradient overflowed, no loss is nan.
    ``at_peak`` is called at each new peak, to note what else is of interest then.  With ``host``, tensors
    that a model makes on the CPU count, too: there lies what the meta device stands for.
    """

    def __init__(self, at_peak: Callable[[], None] = lambda: None, *, host: bool = False) -> None:
        super().__init__(meta=True, host=host, block=ALLOCATOR_BLOCK)
        self._at_peak = at_peak
        self.read_as = 0

    def restart(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return bool(self.read_as) if args[0].dtype is torch.bool else self.read_as
        if func in _INDEXES:  # of a list in the model's code, torch makes a tensor that no mode sees
            self.hold(index for index in args[1] if isinstance(index, Tensor))
        before = self.peak
        kernel = partial(_reduced, func) if func in _IN_PLACE_OF_ALL else func
        result = super().__torch_dispatch__(kernel, types, args, kwargs)
        if self.peak > before:
            self._at_peak()
        return result


_INDEXES = frozenset(
    getattr(torch.ops.aten, name).default for name in ("index_put", "index_put_", "_index_put_impl_")
) | {torch.ops.aten.index.Tensor}
_IN_PLACE_OF_ALL = frozenset(
    getattr(torch.ops.aten, f"{name}_loss").default for name in ("mse", "smooth_l1", "soft_margin")
) | {torch.ops.aten.binary_cross_entropy.default}
"""Losses of which torch computes the terms where it then writes their mean, which holds that memory."""


def _reduced(loss: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = loss(input, *args, **kwargs)
    if input.is_meta:
        result.untyped_storage().resize_(max(input.nbytes, result.nbytes))
    return result


@contextmanager
def gpu_kernels(*, is_cpu: bool = False) -> Iterator[None]:
    """On the meta device, attention that keeps no scores, dropout that keeps a mask of one byte, and autocast
    of CUDA, as on a GPU.  For a device that ``is_cpu``, dropout keeps a mask of its input's dtype, attention
    that drops something keeps its scores, and autocast is that of the CPU.

    Kernels of torch's dispatcher, not a ``TorchFunctionMode``: such a mode is off inside ``backward``, where
    checkpointed layers run again.
    """
    library = torch.library.Library("aten", "IMPL")  # its life ends below
    try:
        for (name, key), kernel in (_CPU_KERNELS if is_cpu else _KERNELS).items():
            library.impl(name, kernel, key, allow_override=True)  # torch has some in Python, too
        with autocast_on_meta("cpu" if is_cpu else "cuda"):
            yield
    finally:
        library._destroy()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if attn_mask is None and query.dtype in HALF_DTYPES:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal)[0]
    if key.size(1) != query.size(1):  # which only flash attention does without scores
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=True)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal)[0]


def _attention_of_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    like_q, like_k, like_v = (on_cpu(t) for t in (query, key, value))
    mask = None if attn_mask is None else on_cpu(attn_mask)
    grouped = {"enable_gqa": options.get("enable_gqa", False)}
    kernel = torch._fused_sdp_choice(like_q, like_k, like_v, mask, dropout_p, is_causal, **grouped)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, query.new_zeros(()), query.new_full((), float("-inf")))
    if kernel != SDPBackend.FLASH_ATTENTION.value:
        slow = torch.ops.aten._scaled_dot_product_attention_math
        return slow(query, key, value, attn_mask, dropout_p, is_causal, **grouped)[0]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask)[0]


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if train and p > 0 else input


def _embedding_sparse_backward(
    gradient: Tensor, indices: Tensor, rows: int, padding: int, scaled: bool
) -> Tensor:
    """A row for each index; torch leaves out that of the padding, which without values would be all."""
    values = gradient.reshape(-1, gradient.size(-1))
    shape = rows, values.size(1)
    return torch.sparse_coo_tensor(indices.reshape(1, -1), values, shape, check_invariants=False)


def _clone_of_sparse(input: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """All elements; torch's own clone on the meta device has none."""
    parts = input._indices().clone(), input._values().clone()
    return torch.sparse_coo_tensor(*parts, input.shape, check_invariants=False)


def _group_norm_of_cpu(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    width: int,
    size: int,
    groups: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """With a weight in fp32, statistics of an input in half precision are in fp32; elsewhere they are not."""
    dtype = input.dtype if weight is None else weight.dtype
    mean, deviation = (input.new_empty((rows, groups), dtype=dtype) for _ in range(2))
    return torch.empty_like(input), mean, deviation


def _group_norm_backward_of_cpu(
    gradient: Tensor, input: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, ...]:
    """The gradient of the input has its dtype, also beside a weight in fp32."""
    *_, width, _, _, needed = sizes
    like = input if weight is None else weight
    made = (torch.empty_like(input), like.new_empty(width), like.new_empty(width))
    return tuple(tensor if is_needed else None for tensor, is_needed in zip(made, needed, strict=True))


_SPARSE_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("embedding_sparse_backward", "AutogradMeta"): _embedding_sparse_backward,
    ("clone", "SparseMeta"): _clone_of_sparse,
}
_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("scaled_dot_product_attention", "AutogradMeta"): _attention,
    ("dropout", "AutogradMeta"): _dropout,
    **_SPARSE_KERNELS,
}
_CPU_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("scaled_dot_product_attention", "AutogradMeta"): _attention_of_cpu,
    **_SPARSE_KERNELS,
    ("native_group_norm", "Meta"): _group_norm_of_cpu,
    ("native_group_norm_backward", "Meta"): _group_norm_backward_of_cpu,
}
"""Kernels by the operation and its dispatch key."""


def step_as_on_gpu(optimizer: Optimizer) -> None:
    """Let torch's optimizers go through all parameters at once, as they do on a GPU; that needs more
    memory.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
