"""The models of the benchmark, on the unified layers: they follow the tensor mode of the launch.

Each is a body of ``layers`` equal parts; a language model and an image classifier have an embedding before it
and a loss over classes behind it.  Every rank draws the same batch and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn as col_nn

VOCABULARY = 8192
CLASSES = 1000
PATCH, CHANNELS = 16, 3
HEAD_SIZE, FEWEST_HEADS = 64, 8


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes that the command line gives."""

    batch_size: int
    seq_len: int
    dimension: int
    layers: int


class MLP(nn.Module):
    """``dimension -> 4 dimension -> dimension``."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dense_1 = col_nn.Linear(dimension, 4 * dimension, role="expand")
        self.dense_2 = col_nn.Linear(4 * dimension, dimension, role="contract")

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_2(F.gelu(self.dense_1(x)))


class BenchmarkAttention(nn.Module):
    """Self-attention with a fused projection; every rank has whole heads."""

    def __init__(self, dimension: int, heads: int, causal: bool) -> None:
        super().__init__()
        if dimension % heads:
            raise ValueError(
                f"dimension={dimension} cannot be shared by {heads} heads; choose a multiple of {heads}"
            )
        self.query_key_value = col_nn.Linear(dimension, 3 * dimension, role="expand", fused=3)
        self.dense = col_nn.Linear(dimension, dimension, role="contract")
        self.causal, self.heads = causal, col_nn.local_heads(heads)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(x)  # (batch, seq, 3 * dimension)
        batch, length, width = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (batch, heads, seq, head size)
        return self.dense(y.transpose(1, 2).reshape(batch, length, width // 3))


class BenchmarkBlock(nn.Module):
    """A transformer block with the norms in front."""

    def __init__(self, dimension: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attn = col_nn.LayerNorm(dimension), BenchmarkAttention(dimension, heads, causal)
        self.norm2, self.mlp = col_nn.LayerNorm(dimension), MLP(dimension)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _blocks(shape: ModelSizes, causal: bool) -> nn.Sequential:
    heads = max(FEWEST_HEADS, shape.dimension // HEAD_SIZE)
    return nn.Sequential(*(BenchmarkBlock(shape.dimension, heads, causal) for _ in range(shape.layers)))


class Perceptron(nn.Module):
    """MLPs on an input of shape (batch, sequence, dimension)."""

    def __init__(self, shape: ModelSizes) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(MLP(shape.dimension) for _ in range(shape.layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


class BenchmarkGPT(nn.Module):
    """Causal blocks between an embedding and a tied head; the output is the loss of the next token."""

    def __init__(self, shape: ModelSizes) -> None:
        super().__init__()
        self.words = col_nn.Embedding(VOCABULARY, shape.dimension)
        self.positions = col_nn.Embedding(shape.seq_len, shape.dimension)
        self.blocks, self.norm = _blocks(shape, causal=True), col_nn.LayerNorm(shape.dimension)
        self.head = col_nn.Classifier(shape.dimension, VOCABULARY, self.words.weight, bias=False)
        self.loss = col_nn.CrossEntropyLoss()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.words(ids) + self.positions(places)
        return self.loss(self.head(self.norm(self.blocks(x))), labels)


class ViT(nn.Module):
    """Blocks that see all patches of an image; the output is the loss of its class."""

    def __init__(self, shape: ModelSizes) -> None:
        super().__init__()
        self.patches = col_nn.PatchEmbedding((PATCH, PATCH * shape.seq_len), PATCH, CHANNELS, shape.dimension)
        self.blocks, self.norm = _blocks(shape, causal=False), col_nn.LayerNorm(shape.dimension)
        self.head = col_nn.Classifier(shape.dimension, CLASSES)
        self.loss = col_nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.patches(images))
        return self.loss(self.head(self.norm(x)[:, 0]), labels)


def _features(shape: ModelSizes) -> tuple[Tensor, ...]:
    return (torch.randn(shape.batch_size, shape.seq_len, shape.dimension),)


def _tokens(shape: ModelSizes) -> tuple[Tensor, ...]:
    size = (shape.batch_size, shape.seq_len)
    return torch.randint(VOCABULARY, size), torch.randint(VOCABULARY, size)


def _images(shape: ModelSizes) -> tuple[Tensor, ...]:
    size = (shape.batch_size, CHANNELS, PATCH, PATCH * shape.seq_len)
    return torch.randn(size), torch.randint(CLASSES, size[:1])


@dataclass(frozen=True)
class Model:
    """A row of the table of models."""

    build: Callable[[ModelSizes], nn.Module]
    draw: Callable[[ModelSizes], tuple[Tensor, ...]]
    """A batch for the whole model."""
    features: bool = False
    """Whether the batch is already activations, cut like those, or what an embedding takes, of which rows are
    cut.
    """


MODELS = {
    "mlp": Model(Perceptron, _features, features=True),
    "gpt": Model(BenchmarkGPT, _tokens),
    "vit": Model(ViT, _images),
}
