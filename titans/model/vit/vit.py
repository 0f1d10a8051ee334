"""The vision transformer: an image as a sequence of patches, classified by the first token.

``embed -> blocks -> norm -> head``; the layers are in ``titans.layer``, shared with GPT but for the mask.
Parameters of a model with C channels, patches of p pixels, N patches, width h, depth L, ``mlp_ratio`` 4 and K
classes: ``(C p^2 + 1) h + (N + 2) h + L (12 h^2 + 13 h) + 2 h + (h + 1) K``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.nn import Classifier, Linear, PatchEmbedding, init, partition_batch
from colossalai.nn.modes import current
from colossalai.nn.sequence import current_sequence
from titans.layer.basic import layer_norm, routed_tokens
from titans.layer.block import Checkpoint, ViTBlock
from titans.layer.embedding import ViTEmbedding
from titans.layer.head import ViTHead


class VisionTransformer(nn.Module):
    """``model(images)`` returns logits of shape (batch, num_classes).

    ``dropout`` acts after the embedding and after each sub-layer; ``drop_path`` grows from 0 in the first
    block to its value in the last; ``representation_size`` adds a ``tanh`` layer before the classifier;
    ``checkpoint`` saves memory (see ``TransformerBlock``).  ``init_method``: ``'torch'`` draws matrices as
    torch's layers do by themselves, ``'jax'`` as the paper's code does (Xavier, and a classifier that starts
    at zero).  ``block`` builds each block, from its number and the arguments of ``ViTBlock``.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        num_heads: int = 12,
        hidden_size: int = 768,
        mlp_ratio: float = 4,
        attention_dropout: float = 0.0,
        dropout: float = 0.1,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        activation: Callable[[Tensor], Tensor] = gelu,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: Checkpoint = False,
        init_method: str = "torch",
        block: Callable[..., ViTBlock] | None = None,
    ) -> None:
        super().__init__()
        if depth < 1 or num_classes < 1:
            raise ValueError(
                f"a ViT needs at least one block and one class, got depth={depth} and"
                f" num_classes={num_classes}"
            )
        self.place, self.sequence = current()._asdict(), current_sequence()
        self.num_classes = num_classes
        self.embed = ViTEmbedding(img_size, patch_size, in_chans, hidden_size, dropout=dropout, dtype=dtype)
        self.tokens = 1 + self.embed.patch_embed.num_patches
        build = block or _block
        self.blocks = nn.ModuleList(
            build(
                number,
                hidden_size=hidden_size,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                activation=activation,
                attention_dropout=attention_dropout,
                dropout=dropout,
                layernorm_epsilon=layernorm_epsilon,
                dtype=dtype,
                bias=bias,
                checkpoint=checkpoint,
                drop_path=drop_path * number / max(depth - 1, 1),
            )
            for number in range(depth)
        )
        self.norm = layer_norm(hidden_size, eps=layernorm_epsilon, dtype=dtype)
        self.head = ViTHead(hidden_size, num_classes, representation_size, bias=bias, dtype=dtype)
        draw_weights(self, init_method)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, num_classes) for ``images`` (batch, in_chans, img_size, img_size)."""
        return run_layers(self, images)


def _block(number: int, **options: Any) -> ViTBlock:
    return ViTBlock(**options)


def run_layers(model: Any, x: Tensor) -> Tensor:
    """What ``model``, a ViT or some of its layers one after the other, makes of ``x``: images, if it has an
    embedding.
    """
    if model.embed is not None:
        x = model.embed(partition_batch(x, **model.place))  # (batch, 1 + patches, hidden)
    mask = None
    if model.sequence is not None and model.sequence.padded(model.tokens) != model.tokens:
        real = torch.ones(len(x), model.tokens, dtype=torch.bool, device=x.device)
        mask = model.sequence.documents(real, causal=False)  # nothing looks at what was added
    routed = None
    if any(block.routes for block in model.blocks.children()):
        routed = routed_tokens(x, None, model.tokens, model.place, model.sequence)
    for block in model.blocks.children():
        x = block(x, mask, routed)
    return x if model.head is None else model.head(model.norm(x))


def draw_weights(model: nn.Module, init_method: str) -> None:
    """Draw the matrices of a ViT, or of layers of it, by one of the two methods of ``VisionTransformer``."""
    if init_method not in INIT_METHODS:
        raise ValueError(f"init_method must be one of {', '.join(INIT_METHODS)}, got {init_method!r}")
    for module in model.modules():
        if isinstance(module, Linear | Classifier | PatchEmbedding):
            INIT_METHODS[init_method](module)


def _draw_as_torch(module: Linear | Classifier | PatchEmbedding) -> None:
    init.WEIGHT(module.weight)
    if module.bias is not None:
        init.BIAS(module.bias, fan_in=_fan_in(module))


def _draw_as_jax(module: Linear | Classifier | PatchEmbedding) -> None:
    if isinstance(module, PatchEmbedding):
        # as wide as its inputs are many
        init.trunc_normal_(std=_fan_in(module) ** -0.5)(module.weight)
    elif isinstance(module, Classifier):
        init.zeros_()(module.weight)
    else:
        init.xavier_uniform_()(module.weight)
    if module.bias is not None:
        init.zeros_()(module.bias)


def _fan_in(module: Linear | Classifier | PatchEmbedding) -> int:
    if isinstance(module, PatchEmbedding):
        return module.in_chans * module.patch_size[0] * module.patch_size[1]
    return module.in_features


INIT_METHODS: dict[str, Callable[[Linear | Classifier | PatchEmbedding], None]] = {
    "torch": _draw_as_torch,
    "jax": _draw_as_jax,
}


def _create_vit_model(**model_kwargs: Any) -> VisionTransformer:
    return VisionTransformer(**model_kwargs)


def _named(size: dict[str, int], patch_size: int, img_size: int) -> partial[VisionTransformer]:
    return partial(_create_vit_model, **size, patch_size=patch_size, img_size=img_size)


# The sizes of the papers; keyword arguments of the calls go to VisionTransformer and take precedence.
_TINY = {"hidden_size": 192, "depth": 12, "num_heads": 3}
_SMALL = {"hidden_size": 384, "depth": 12, "num_heads": 6}
_BASE = {"hidden_size": 768, "depth": 12, "num_heads": 12}
_LARGE = {"hidden_size": 1024, "depth": 24, "num_heads": 16}
# ViT-Lite of "Escaping the Big Data Paradigm with Compact Transformers", for CIFAR-10
_LITE = {"hidden_size": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2, "num_classes": 10}
# the one of the examples: wider and flatter than tiny, and its heads divide among 2, 4 or 8 ranks
_TINY_CIFAR = {"hidden_size": 512, "depth": 6, "num_heads": 8, "mlp_ratio": 1, "num_classes": 10}

vit_lite_depth7_patch4_32 = _named(_LITE, 4, 32)
vit_tiny_patch4_32 = _named(_TINY_CIFAR, 4, 32)
vit_tiny_patch16_224 = _named(_TINY, 16, 224)
vit_tiny_patch16_384 = _named(_TINY, 16, 384)
vit_tiny_patch32_224 = _named(_TINY, 32, 224)
vit_tiny_patch32_384 = _named(_TINY, 32, 384)
vit_small_patch16_224 = _named(_SMALL, 16, 224)
vit_small_patch16_384 = _named(_SMALL, 16, 384)
vit_small_patch32_224 = _named(_SMALL, 32, 224)
vit_small_patch32_384 = _named(_SMALL, 32, 384)
vit_base_patch16_224 = _named(_BASE, 16, 224)
vit_base_patch16_384 = _named(_BASE, 16, 384)
vit_base_patch32_224 = _named(_BASE, 32, 224)
vit_base_patch32_384 = _named(_BASE, 32, 384)
vit_large_patch16_224 = _named(_LARGE, 16, 224)
vit_large_patch16_384 = _named(_LARGE, 16, 384)
vit_large_patch32_224 = _named(_LARGE, 32, 224)
vit_large_patch32_384 = _named(_LARGE, 32, 384)
