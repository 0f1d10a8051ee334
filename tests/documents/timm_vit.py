"""A stand-in for ``timm.models.vision_transformer``: what page 12 takes from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

__all__ = ["Block", "PatchEmbed", "_init_vit_weights", "trunc_normal_"]


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        drop: float,
        attn_drop: float,
        drop_path: float,
        norm_layer: Callable[[int], nn.Module],
        act_layer: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        assert drop == attn_drop == drop_path == 0
        self.norm1, self.norm2 = norm_layer(dim), norm_layer(dim)
        self.attn = nn.MultiheadAttention(dim, num_heads, bias=qkv_bias, batch_first=True)
        inner = int(mlp_ratio * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, inner), act_layer(), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


@torch.no_grad()
def _init_vit_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            module.bias.zero_()
