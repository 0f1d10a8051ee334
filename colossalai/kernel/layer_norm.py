"""``MixedFusedLayerNorm``, documented as ``colossalai.kernel.LayerNorm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai._numeric import autocast_dtype


class MixedFusedLayerNorm(nn.LayerNorm):
    """Layer normalization by PyTorch's kernel, whose weights may have another dtype than its input.

    Where they do, it computes in float32 and returns the dtype of the weights.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps=eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype or autocast_dtype(input.device) is not None:
            return super().forward(input)
        shape = list(self.normalized_shape)
        wide = F.layer_norm(input.float(), shape, self.weight.float(), self.bias.float(), self.eps)
        return wide.to(self.weight.dtype)
