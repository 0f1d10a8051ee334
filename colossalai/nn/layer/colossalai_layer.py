"""The documented place of the layers that follow the mode of the config."""

from __future__ import annotations

from typing import Any

from torch import nn

from colossalai.nn.layer.batch import partition_batch
from colossalai.nn.layer.classifier import Classifier
from colossalai.nn.layer.dropout import Dropout
from colossalai.nn.layer.embedding import Embedding
from colossalai.nn.layer.linear import Linear
from colossalai.nn.layer.normalization import LayerNorm
from colossalai.nn.layer.patch import PatchEmbedding


class ColossalaiModule(nn.Module):
    """A module around a layer, for layers of a script's own: calls go to ``module``, and keywords become
    attributes.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        for name, value in kwargs.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


__all__ = [
    "Classifier",
    "ColossalaiModule",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "PatchEmbedding",
    "partition_batch",
]
