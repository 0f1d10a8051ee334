"""One transformer block: attention and MLP, each behind a layer norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.nn.layer.moe import MoeLayer, MoeModule
from colossalai.utils import checkpoint as checkpointed
from titans.layer.attention import GPTSelfAttention, SelfAttention, ViTSelfAttention
from titans.layer.basic import INIT_STD, layer_norm
from titans.layer.drop_path import DropPath
from titans.layer.mlp import ExpertMLP, TransformerMLP

Checkpoint = bool | Literal["selective"]


class TransformerBlock(nn.Module):
    """``x += attention(norm1(x)); x += mlp(norm2(x))``.

    The mask is what ``SelfAttention`` takes.

    ``apply_post_layernorm`` adds to the normalized stream instead: ``n = norm1(x); x = n + attention(n)``.
    ``checkpoint`` keeps only the block's input for the backward pass and computes the rest again, or, if it
    is ``"selective"``, keeps the results of matrix products and attention too and computes what is cheap
    again; ``activation_offload`` moves that input to the CPU until it is needed.  ``drop_path`` is how often
    a sample skips what a sub-layer adds (see ``DropPath``).  ``mlp`` builds what stands in the place of a
    ``TransformerMLP``, from the same arguments; ``attn`` is the attention of another block, shared with it.
    """

    attention: ClassVar[type[SelfAttention]]

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
        checkpoint: Checkpoint = False,
        activation_offload: bool = False,
        output_std: float = INIT_STD,
        drop_path: float = 0.0,
        mlp: Callable[..., nn.Module] = TransformerMLP,
        attn: SelfAttention | None = None,
    ) -> None:
        super().__init__()
        if checkpoint not in (True, False, "selective"):
            raise ValueError(f"checkpoint is True, False or 'selective', got {checkpoint!r}")
        if activation_offload and checkpoint is not True:
            raise ValueError(
                f"activation_offload=True moves what checkpointing keeps, but checkpoint={checkpoint!r}; "
                "set checkpoint=True as well"
            )
        self.apply_post_layernorm = apply_post_layernorm
        self.checkpoint = checkpoint
        self.activation_offload = activation_offload
        self.norm1 = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)
        self.attn = attn or self.attention(
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
        self.mlp = mlp(
            hidden_size,
            mlp_ratio,
            activation=activation,
            dropout=dropout,
            bias=bias,
            dtype=dtype,
            output_std=output_std,
        )
        self.drop_path = DropPath(drop_path)
        self.routes = isinstance(self.mlp, ExpertMLP | MoeLayer | MoeModule)
        """Whether the MLP has experts, which padding must not take places from."""

    def run(self, x: Tensor, attention_mask: Tensor | None = None, routed: Tensor | None = None) -> Tensor:
        """The block's output, checkpointed if it is to be.

        ``routed`` (batch, sequence) is False at padding, which goes to no expert; None if there is none.
        """
        if self.checkpoint and self.training:
            return checkpointed(
                self._run,
                self.activation_offload,
                x,
                attention_mask,
                routed,
                use_reentrant=False,
                keep_products=self.checkpoint == "selective",
            )
        return self._run(x, attention_mask, routed)

    def _run(self, x: Tensor, attention_mask: Tensor | None, routed: Tensor | None) -> Tensor:
        normed = self.norm1(x)  # (batch, seq, hidden), as everything here
        x = (normed if self.apply_post_layernorm else x) + self.drop_path(self.attn(normed, attention_mask))
        normed = self.norm2(x)
        return (normed if self.apply_post_layernorm else x) + self.drop_path(self._feed(normed, routed))

    def _feed(self, x: Tensor, routed: Tensor | None) -> Tensor:
        y: Tensor = self.mlp(x, routed) if self.routes else self.mlp(x)
        return y


class GPTBlock(TransformerBlock):
    """A block with causal attention.  The mask goes in and out unchanged, so that blocks can be chained."""

    attention = GPTSelfAttention

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, routed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.run(x, attention_mask, routed), attention_mask


class MOEGPTBlock(GPTBlock):
    """A ``GPTBlock`` with ``num_experts`` experts in the place of its MLP; ``routing`` are the keyword
    arguments of ``ExpertMLP`` by which tokens find them, the others those of ``GPTBlock``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_experts: int,
        *,
        routing: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        mlp = partial(ExpertMLP, num_experts=num_experts, **(routing or {}))
        super().__init__(hidden_size, num_heads, mlp=mlp, **options)


class ViTBlock(TransformerBlock):
    """A block in which every token looks at all tokens."""

    attention = ViTSelfAttention

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, routed: Tensor | None = None
    ) -> Tensor:
        return self.run(x, attention_mask, routed)


class BertBlock(TransformerBlock):
    """A block whose layer norms come after the additions; every token looks at all that the mask allows."""

    attention = ViTSelfAttention

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.run(x, attention_mask), attention_mask

    def _run(self, x: Tensor, attention_mask: Tensor | None, routed: Tensor | None) -> Tensor:
        x = self.norm1(x + self.drop_path(self.attn(x, attention_mask)))  # (batch, seq, hidden)
        return self.norm2(x + self.drop_path(self._feed(x, routed)))
