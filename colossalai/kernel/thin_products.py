"""Products of one row with weights on a GPU: a mode in which linear layers read their weights at the memory's
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colossalai.kernel.probe import triton_works


class ThinProducts(TorchFunctionMode):
    """Linear layers of one row by our kernel, without gradients; all others are torch's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return linear(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    if not _takes(input, weight, bias):
        return F.linear(input, weight, bias)
    from colossalai.kernel import triton_rows

    row = input.reshape(1, -1)
    return triton_rows.one_row(row, weight, bias).view(*input.shape[:-1], -1)


def _takes(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    alike = all(t is None or t.dtype == input.dtype for t in (weight, bias))
    return (
        input.is_cuda
        and alike
        and input.dtype in (torch.bfloat16, torch.float16)
        and input.numel() == input.size(-1)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and triton_works()
    )
