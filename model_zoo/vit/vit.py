"""The layers of a ViT for models built by hand: ``titans.layer`` with the older names of arguments.

Each layer draws its own weights by ``init_method``, and the embedding takes the whole batch and goes on with
this rank's rows; in ``titans`` the model does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from colossalai.nn import partition_batch
from colossalai.nn.modes import current
from titans.layer import block, embedding, head
from titans.layer.block import Checkpoint
from titans.model.vit.vit import VisionTransformer, draw_weights

__all__ = ["ViTBlock", "ViTEmbedding", "ViTHead", "VisionTransformer", "_create_vit_model"]


class ViTEmbedding(embedding.ViTEmbedding):
    """Images (batch, in_chans, img_size, img_size) to tokens (batch, 1 + patches, embedding_dim)."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embedding_dim: int,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        init_method: str = "torch",
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embedding_dim, dropout, dtype)
        self.place = current()._asdict()
        draw_weights(self, init_method)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(partition_batch(images, **self.place))


class ViTBlock(block.ViTBlock):
    """One block; ``dim`` is the width of the stream."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4,
        activation: Callable[[Tensor], Tensor] = gelu,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: Checkpoint = False,
        init_method: str = "torch",
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            mlp_ratio=mlp_ratio,
            activation=activation,
            attention_dropout=attention_dropout,
            dropout=dropout,
            layernorm_epsilon=layernorm_epsilon,
            dtype=dtype,
            bias=bias,
            checkpoint=checkpoint,
            drop_path=drop_path,
        )
        draw_weights(self, init_method)


class ViTHead(head.ViTHead):
    """Logits of the classes from the class token."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        init_method: str = "torch",
    ) -> None:
        super().__init__(dim, num_classes, representation_size, bias, dtype)
        draw_weights(self, init_method)


def _create_vit_model(*, dim: int = 768, **kwargs: Any) -> VisionTransformer:
    return VisionTransformer(hidden_size=dim, **kwargs)
