"""One transformer block: attention and MLP, each behind a layer norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.utils import checkpoint as checkpointed
from titans.layer.attention import GPTSelfAttention
from titans.layer.basic import INIT_STD, layer_norm
from titans.layer.mlp import TransformerMLP


class GPTBlock(nn.Module):
    """``x += attention(norm1(x)); x += mlp(norm2(x))``.

    ``apply_post_layernorm`` adds to the normalized stream instead: ``n = norm1(x); x = n + attention(n)``.
    ``checkpoint`` keeps only the block's input for the backward pass and computes the rest again;
    ``activation_offload`` moves that input to the CPU until it is needed.

    The mask goes in and out unchanged, so that blocks can be chained.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        activation: Callable[[Tensor], Tensor] = gelu,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        apply_post_layernorm: bool = False,
        fuse_scale_mask_softmax: bool = False,
        checkpoint: bool = False,
        activation_offload: bool = False,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        if activation_offload and not checkpoint:
            raise ValueError(
                "activation_offload=True moves what checkpointing keeps, but checkpoint=False; "
                "set checkpoint=True as well"
            )
        self.apply_post_layernorm = apply_post_layernorm
        self.checkpoint = checkpoint
        self.activation_offload = activation_offload
        self.norm1 = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)
        self.attn = GPTSelfAttention(
            hidden_size,
            num_heads,
            attention_dropout=attention_dropout,
            dropout=dropout,
            bias=bias,
            fuse_scale_mask_softmax=fuse_scale_mask_softmax,
            dtype=dtype,
            output_std=output_std,
        )
        self.norm2 = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)
        self.mlp = TransformerMLP(
            hidden_size,
            mlp_ratio,
            activation=activation,
            dropout=dropout,
            bias=bias,
            dtype=dtype,
            output_std=output_std,
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.checkpoint and self.training:
            x = checkpointed(self._forward, self.activation_offload, x, attention_mask, use_reentrant=False)
        else:
            x = self._forward(x, attention_mask)
        return x, attention_mask

    def _forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        normed = self.norm1(x)  # (batch, seq, hidden), as everything here
        x = (normed if self.apply_post_layernorm else x) + self.attn(normed, attention_mask)
        normed = self.norm2(x)
        return (normed if self.apply_post_layernorm else x) + self.mlp(normed)
