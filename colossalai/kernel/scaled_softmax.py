"""``FusedScaleMaskSoftmax``: the softmax of attention, with a scale and a mask."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn


class AttnMaskType(Enum):
    """Which scores do not count."""

    padding = 1  # those that the mask names
    causal = 2  # those of keys behind the query, and those that a mask names
    paddedcausal = 3  # the same, by its other name


def future(scores: Tensor) -> Tensor:
    """True for the keys behind each query."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)


def widened(x: Tensor) -> Tensor:
    """``x`` in float32, as the exponentials of half precision would be rounded before they are summed; in
    float64 if it has that dtype.
    """
    return x if x.dtype is torch.float64 else x.float()


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """``softmax(scale * scores)`` without the masked ones, computed in float32 or float64."""
    wide = widened(scores) if scale is None else widened(scores) * scale
    if mask is not None:  # below any score, and a row without keys has no nan
        wide = wide.masked_fill(mask, torch.finfo(wide.dtype).min)
    return wide.softmax(-1).to(scores.dtype)


def softmax_backward(output_grads: Tensor, results: Tensor, scale: float) -> Tensor:
    """The gradient of the scores of ``masked_softmax``, from its results."""
    grads, weights = widened(output_grads), widened(results)
    inner = (grads * weights).sum(-1, keepdim=True)
    return (weights * (grads - inner) * scale).to(results.dtype)


class FusedScaleMaskSoftmax(nn.Module):
    """``softmax(scale * scores)`` without the masked scores, in the dtype of the scores.

    Args:
        input_in_fp16, input_in_bf16: the dtype that scores will have; others are refused.
        attn_mask_type: ``causal`` masks the keys behind each query, beside what ``mask`` says.
        scaled_masked_softmax_fusion: ``False`` lets ``mask_func`` apply the mask in the dtype of the scores;
            otherwise masked scores get no weight.
        mask_func: ``mask_func(scores, mask)`` gives scores that are small where the mask is true.
        softmax_in_fp32: compute in float32, and scores of float64 in float64.
        scale: needs ``softmax_in_fp32``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError(
                "FusedScaleMaskSoftmax takes scores of one dtype, got input_in_fp16 and input_in_bf16"
            )
        if scale is not None and not softmax_in_fp32:
            raise ValueError(
                f"FusedScaleMaskSoftmax with scale={scale} needs softmax_in_fp32=True: scaled scores overflow"
                " in half precision"
            )
        if not isinstance(attn_mask_type, AttnMaskType):
            raise TypeError(
                f"attn_mask_type is one of {', '.join(map(str, AttnMaskType))}, got {attn_mask_type!r}"
            )
        self.input_dtype = torch.float16 if input_in_fp16 else torch.bfloat16 if input_in_bf16 else None
        self.attn_mask_type, self.mask_func = attn_mask_type, mask_func
        self.fusion, self.softmax_in_fp32, self.scale = scaled_masked_softmax_fusion, softmax_in_fp32, scale

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of scores (batch, heads, queries, keys), where ``mask`` is true or 1 for those that do not
        count.
        """
        if input.dim() != 4:
            raise ValueError(f"scores are (batch, heads, queries, keys), got {tuple(input.shape)}")
        if self.input_dtype is not None and input.dtype is not self.input_dtype:
            raise TypeError(
                f"FusedScaleMaskSoftmax was built for scores of {self.input_dtype}, got {input.dtype}"
            )
        hidden = None if mask is None else mask.bool()
        if self.attn_mask_type is not AttnMaskType.padding:
            hidden = future(input) if hidden is None else hidden | future(input)
        if self.fusion or self.mask_func is None:
            return masked_softmax(input, hidden, self.scale)
        scores = widened(input) if self.softmax_in_fp32 else input
        scores = scores if self.scale is None else scores * self.scale
        scores = scores if hidden is None else self.mask_func(scores, hidden)
        return scores.softmax(-1).to(input.dtype)
