"""The vision transformer as pipeline stages, under any tensor mode: stages of
``titans.model.vit.VisionTransformer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans.model.stages import Stage, build_pipeline
from titans.model.vit.vit import VisionTransformer, run_layers


class ViTStage(Stage):
    """Some layers of a ViT.  ``x`` is what the stage before returned, or the images."""

    def __init__(self, model: Any, start: int, end: int) -> None:
        super().__init__(model, start, end)
        self.tokens = model.tokens

    def forward(self, x: Tensor) -> Tensor:
        return run_layers(self, x)


def build_pipeline_vit(
    num_layers: int,
    num_chunks: int = 1,
    device: torch.device | None = None,
    model: Callable[..., VisionTransformer] = VisionTransformer,
    **kwargs: Any,
) -> nn.Module:
    """This rank's stages of a ViT with ``num_layers`` blocks; further arguments are those of ``model``, such
    as ``VisionTransformer`` or ``ViTMoE``.
    """
    kwargs["depth"] = num_layers
    return build_pipeline(lambda: model(**kwargs), ViTStage, num_layers, num_chunks, device)
