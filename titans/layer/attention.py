"""Self-attention: every token looks at all tokens or, if causal, at itself and at the tokens before it.

``softmax(Q K^T / sqrt(d) + mask) V`` is one call of torch's ``scaled_dot_product_attention``, which picks a
fused kernel where it has one.  Queries, keys and values come from one matrix product; its output holds the
three blocks one after the other, ``[Q | K | V]``, and each block holds the heads one after the other.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from titans.layer.basic import INIT_STD, linear

FUSED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def causal_mask(attention_mask: Tensor, length: int) -> Tensor:
    """Join a mask over keys with the causal one; the result broadcasts to (batch, heads, query, key).

    ``attention_mask`` broadcasts to the same shape, usually as (batch, 1, 1, key): bool (True: may be looked
    at) or floating (added to the scores).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    if attention_mask.dtype != torch.bool:
        return attention_mask.masked_fill(~causal, float("-inf"))
    # A padding token may look at itself: a row with nothing to look at would be 0 / 0, and the NaN would
    # reach the gradients of every weight.
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return attention_mask & causal | itself


class SelfAttention(nn.Module):
    """Multi-head self-attention; a subclass says whether it is causal.

    With ``fuse_scale_mask_softmax`` only torch's fused kernels are used, which never store the
    (sequence x sequence) scores; where none fits, an error says so.  Without it torch chooses freely.
    """

    causal: ClassVar[bool]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        bias: bool = True,
        fuse_scale_mask_softmax: bool = False,
        dtype: torch.dtype | None = None,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}; "
                "every head gets an equal share, so choose a multiple"
            )
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.fuse_scale_mask_softmax = fuse_scale_mask_softmax
        self.query_key_value = linear(hidden_size, 3 * hidden_size, bias=bias, dtype=dtype)
        self.dense = linear(hidden_size, hidden_size, bias=bias, dtype=dtype, std=output_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        qkv = self.query_key_value(x)  # (batch, seq, 3 * hidden)
        batch, length, width = qkv.shape
        qkv = qkv.view(batch, length, 3, self.num_heads, width // (3 * self.num_heads))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, head_dim)
        y = self._attend(q, k, v, attention_mask)  # (batch, heads, seq, head_dim)
        y = y.transpose(1, 2).reshape(batch, length, width // 3)  # (batch, seq, hidden)
        return self.dropout(self.dense(y))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        mask = attention_mask
        if mask is not None and self.causal:
            mask = causal_mask(mask, q.shape[2])
        dropout = self.attention_dropout if self.training else 0.0

        def attend() -> Tensor:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=self.causal and mask is None
            )

        if not self.fuse_scale_mask_softmax:
            return attend()
        try:
            with sdpa_kernel(FUSED_BACKENDS):
                return attend()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise RuntimeError(
                f"fuse_scale_mask_softmax=True, but torch has no fused attention kernel for {q.dtype} on "
                f"{q.device.type} with head size {q.shape[-1]} and attention dropout {dropout}; "
                "set fuse_scale_mask_softmax=False (on a CPU, attention_dropout=0 also helps)"
            ) from error


class GPTSelfAttention(SelfAttention):
    """A token looks at itself and at the tokens before it."""

    causal = True


class ViTSelfAttention(SelfAttention):
    """A token looks at all tokens."""

    causal = False
