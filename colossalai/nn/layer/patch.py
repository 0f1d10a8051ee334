"""Makes tokens of images: a vector for each patch, a class token before them, a vector for each position.

Each rank computes its own features of its own images, so nothing travels forward; the gradients are summed
over the ranks that hold other images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import colossalai.nn.init as init
from colossalai.mesh import Layout, Mesh, redistribute, use
from colossalai.nn.layer.base import Fill, ParallelLayer
from colossalai.nn.layer.utils import to_2tuple
from colossalai.nn.modes import TensorParallel


class PatchEmbedding(ParallelLayer):
    """Images (batch, in_chans, height, width) to tokens (batch, 1 + patches, embed_size).

    The first token is the class token.  With ``flatten=False`` the result is the map of patches (batch,
    embed_size, rows, columns), without class token and positions.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        in_chans: int,
        embed_size: int,
        dtype: torch.dtype | None = None,
        flatten: bool = True,
        weight_initializer: Fill | None = init.WEIGHT,
        bias_initializer: Fill | None = init.BIAS,
        position_embed_initializer: Fill | None = init.POSITIONS,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(tp, mesh)
        self._require_hidden()
        if not isinstance(flatten, bool) or not isinstance(dtype, torch.dtype | None):
            raise TypeError(
                f"{type(self).__name__}: flatten is True or False and dtype a torch.dtype or None, got"
                f" flatten={flatten!r}, dtype={dtype!r}; PatchEmbedding and PatchEmbedding1D take dtype"
                " first, PatchEmbedding2D, 2p5D and 3D flatten"
            )
        self.img_size, self.patch_size = to_2tuple(img_size), to_2tuple(patch_size)
        self.in_chans, self.embed_size, self.flatten = in_chans, embed_size, flatten
        if any(p < 1 or i < p or i % p for i, p in zip(self.img_size, self.patch_size, strict=True)):
            raise ValueError(
                f"img_size={img_size} is not a multiple of patch_size={patch_size}; patches must cover the"
                " image"
            )
        feature = self.tp.hidden.dims[-1]
        self._check_size("embed_size", embed_size, (feature,))
        rows, columns = (i // p for i, p in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = rows * columns
        pixels = in_chans * self.patch_size[0] * self.patch_size[1]
        self.weight = self._parameter(
            (embed_size, in_chans, *self.patch_size),
            Layout((feature, (), (), ())),
            weight_initializer,
            fan_in=pixels,
            fan_out=embed_size,
            dtype=dtype,
        )
        self.bias = self._parameter(
            (embed_size,), self.tp.feature, bias_initializer, fan_in=pixels, dtype=dtype
        )
        if flatten:
            token = Layout(((), (), feature))
            tokens = (1, self.num_patches + 1, embed_size)
            self.cls_token = self._parameter((1, 1, embed_size), token, init.zeros_(), dtype=dtype)
            self.pos_embed = self._parameter(tokens, token, position_embed_initializer, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        expected = (self.in_chans, *self.img_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"{type(self).__name__} needs images of shape (batch, {', '.join(map(str, expected))}), got "
                f"{tuple(images.shape)}; resize them, or build the model with their img_size and in_chans"
            )
        x = F.conv2d(self._shared(images), self._used(self.weight), self._used(self.bias), self.patch_size)
        if not self.flatten:
            return x
        x = x.flatten(2).transpose(1, 2)  # (batch, patches, hidden)
        x = torch.cat([self._used(self.cls_token).expand(len(x), -1, -1), x], dim=1)
        return self._at_rest(x + self._used(self.pos_embed))

    def _used(self, param: Tensor) -> Tensor:
        return param if self.plain else use(param, self.tp.hidden.dims[0], self.mesh)

    def _shared(self, images: Tensor) -> Tensor:
        """Ranks that hold other features use the same images: a gradient of the images is their sum."""
        if self.plain or not images.requires_grad:
            return images
        rest = Layout((self.tp.hidden.dims[0], (), (), ()))
        feature = frozenset(self.tp.hidden.dims[-1])
        return redistribute(images, rest, Layout(rest.dims, spread=feature), self.mesh)

    def _at_rest(self, x: Tensor) -> Tensor:
        """Under sequence parallelism, this rank's tokens."""
        sequence = self.tp.hidden.dims[1]
        if self.plain or not sequence:
            return x
        parts = self.mesh.group_size(*sequence)
        if x.size(1) % parts:
            raise ValueError(
                f"{type(self).__name__} makes {x.size(1)} tokens (with the class token), which sequence"
                f" parallelism over {parts} ranks cannot share equally; use another img_size or patch_size,"
                " or no sequence_parallel"
            )
        whole = Layout((self.tp.hidden.dims[0], (), self.tp.hidden.dims[2]))
        return redistribute(x, whole, self.tp.hidden, self.mesh)
