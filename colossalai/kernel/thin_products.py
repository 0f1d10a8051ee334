"""A mode for decode steps on a GPU: linear layers of one row read their weights at the memory's speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colossalai.kernel.probe import triton_works


class ThinProducts(TorchFunctionMode):
    """Linear layers of one row, and layer norms, by our kernels, without gradients; all else is torch's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **kwargs or {})
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.numel() != input.size(-1) or weight.dim() != 2 or not _takes(input, weight, bias):
        return F.linear(input, weight, bias)
    from colossalai.kernel import triton_rows

    return triton_rows.one_row(input.reshape(1, -1), weight, bias).view(*input.shape[:-1], -1)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1 or normalized_shape[0] > 1 << 14 or not _takes(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    from colossalai.kernel import triton_exact

    return triton_exact.normalize(input, weight, bias, eps, centered=True, width=input.size(-1))[0]


def _takes(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16)
        and all(t is None or (t.dtype == first.dtype and t.stride(-1) == 1) for t in tensors)
        and triton_works()
    )
