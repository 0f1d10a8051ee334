"""Models of layers with a mode in their names, given the whole batch, train like plain torch: losses,
gradients, weights after steps; and tables and heads are cut as the documents say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from tests.nn.layer.world import close, copy_to_serial, whole

# a prime number of words and classes: no mode cuts them evenly
BATCH, SEQUENCE, HIDDEN, WORDS, STEPS = 8, 4, 8, 37, 3
IMAGE, PATCH, CHANNELS = 4, 2, 3
TENSOR = {
    "1d": ({"size": 2, "mode": "1d"}, "1D"),
    "1d-4": ({"size": 4, "mode": "1d"}, "1D"),
    "1d-sequence": ({"size": 2, "mode": "1d", "sequence_parallel": True}, "1D"),
    "2d": ({"size": 4, "mode": "2d"}, "2D"),
    "2.5d-flat": ({"size": 4, "mode": "2.5d", "depth": 1}, "2p5D"),
    "2.5d": ({"size": 8, "mode": "2.5d", "depth": 2}, "2p5D"),
    "3d": ({"size": 8, "mode": "3d"}, "3D"),
}


def start(rank: int, world_size: int, port: int, name: str) -> str:
    tensor, suffix = TENSOR[name]
    config = {"parallel": {"tensor": tensor}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    return suffix


def linears(suffix: str) -> list[nn.Module]:
    if suffix == "1D":
        return [col_nn.Linear1D_Col(HIDDEN, 2 * HIDDEN), col_nn.Linear1D_Row(2 * HIDDEN, HIDDEN)]
    kind = getattr(col_nn, f"Linear{suffix}")
    return [kind(HIDDEN, 2 * HIDDEN), kind(2 * HIDDEN, HIDDEN)]


class Block(nn.Module):
    """A norm and two linears, which the models have in common."""

    def __init__(self, norm: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, *layers

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Words and positions, which are given with one row; ``head`` scores words."""

    def __init__(self, words: nn.Module, positions: nn.Module, block: Block, head: nn.Module) -> None:
        super().__init__()
        self.words, self.positions, self.block, self.head = words, positions, block, head

    def forward(self, ids: Tensor) -> Tensor:
        places = self.positions(torch.arange(SEQUENCE).unsqueeze(0))
        return self.head(self.block(self.words(ids) + places))


class Vision(nn.Module):
    def __init__(self, patches: nn.Module, block: Block, head: nn.Module) -> None:
        super().__init__()
        self.patches, self.block, self.head = patches, block, head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(col_nn.first_token(self.block(self.patches(images))))


class SerialVision(Vision):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.patches(images))[:, 0])


def serial_block(norm: nn.Module) -> Block:
    return Block(nn.LayerNorm(HIDDEN, eps=norm.eps), [nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)])


def language(suffix: str, vocab: str, tied: bool) -> tuple[nn.Module, nn.Module]:
    embedding, classifier = (getattr(col_nn, f"{vocab}{k}{suffix}") for k in ("Embedding", "Classifier"))
    words = embedding(WORDS, HIDDEN, padding_idx=3)
    positions = getattr(col_nn, f"Embedding{suffix}")(SEQUENCE, HIDDEN)
    norm = getattr(col_nn, f"LayerNorm{suffix}")(HIDDEN)
    block = Block(norm, linears(suffix))
    model = Language(words, positions, block, classifier(HIDDEN, WORDS, words.weight if tied else None))
    serial = Language(
        nn.Embedding(WORDS, HIDDEN, padding_idx=3),
        nn.Embedding(SEQUENCE, HIDDEN),
        serial_block(norm),
        nn.Linear(HIDDEN, WORDS),
    )
    if tied:
        serial.head.weight = serial.words.weight
    return model, serial


def vision(suffix: str) -> tuple[nn.Module, nn.Module]:
    patches = getattr(col_nn, f"PatchEmbedding{suffix}")(IMAGE, PATCH, CHANNELS, HIDDEN)
    norm = getattr(col_nn, f"LayerNorm{suffix}")(HIDDEN)
    head = getattr(col_nn, f"Classifier{suffix}")(HIDDEN, 5)
    model = Vision(patches, Block(norm, linears(suffix)), head)
    serial_patches = col_nn.VanillaPatchEmbedding(IMAGE, PATCH, CHANNELS, HIDDEN)
    return model, SerialVision(serial_patches, serial_block(norm), nn.Linear(HIDDEN, 5))


def loss_of(suffix: str, vocab: str) -> nn.Module:
    return getattr(col_nn, f"{vocab}CrossEntropyLoss{suffix}", col_nn.CrossEntropyLoss)()


def train_both(model: nn.Module, serial: nn.Module, criterion: nn.Module, batches: Callable) -> None:
    mesh = gpc.mesh
    copy_to_serial(model, serial, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, serial)]
    theirs = dict(serial.named_parameters())
    for step in range(STEPS):
        x, labels = batches()
        got, expected = criterion(model(x), labels), _plain_loss(serial(x), labels)
        close(got.detach(), expected.detach(), f"loss of step {step}")
        for optimizer, loss in zip(optimizers, (got, expected), strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, p in model.named_parameters():
            close(whole(p.grad, p, mesh), theirs[name].grad, f"gradient of {name} in step {step}", 1e-4)
        for optimizer in optimizers:
            optimizer.step()
    for name, p in model.named_parameters():
        close(whole(p.detach(), p, mesh), theirs[name].detach(), f"{name} after {STEPS} steps", 1e-4)


def _plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def ids() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (BATCH, SEQUENCE)), torch.randint(WORDS, (BATCH, SEQUENCE))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, CHANNELS, IMAGE, IMAGE), torch.randint(5, (BATCH,))


def _train(rank: int, world_size: int, port: int, name: str) -> None:
    suffix = start(rank, world_size, port, name)
    for vocab in ("", "VocabParallel"):
        for tied in (False, True):
            torch.manual_seed(0)
            train_both(*language(suffix, vocab, tied), loss_of(suffix, vocab), ids)
    if "sequence" not in name:  # 5 tokens cannot be shared
        train_both(*vision(suffix), loss_of(suffix, ""), images)
    if suffix == "1D":
        _one_part(world_size)
    else:
        _refused(suffix)


def _one_part(size: int) -> None:
    """1D: every table and head has 1/size of the weight on each rank."""
    for kind in ("Embedding1D", "VocabParallelEmbedding1D", "Classifier1D", "VocabParallelClassifier1D"):
        first = (64, HIDDEN) if "Embedding" in kind else (HIDDEN, 64)
        layer = getattr(col_nn, kind)(*first)
        assert layer.weight.numel() * size == 64 * HIDDEN, kind
    assert col_nn.Embedding1D(64, HIDDEN).weight.shape == (64, HIDDEN // size)
    assert col_nn.Classifier1D(HIDDEN, 64).weight.shape == (64, HIDDEN // size)
    # followers of the config are cut alike, below and above the limit
    for layer in (
        col_nn.Embedding(64, HIDDEN),
        col_nn.Embedding(4096, HIDDEN),
        col_nn.Classifier(HIDDEN, 64),
    ):
        assert layer.weight.numel() * size == math.prod(layer.weight.full_shape)
    # the scores of a head that was asked for whole ones
    head = col_nn.VocabParallelClassifier1D(HIDDEN, WORDS, None, True, None, True)
    assert head(torch.zeros(2, 1 + SEQUENCE // size if current_sequence() else 3, HIDDEN)).shape[-1] == WORDS


def current_sequence() -> bool:
    return bool(col_nn.modes.current().tp.hidden.dims[1])


def _refused(suffix: str) -> None:
    (batch, _), (pixels, _) = ids(), images()
    for kind, x in (("Embedding", batch), ("VocabParallelEmbedding", batch), ("PatchEmbedding", pixels)):
        sizes = (IMAGE, PATCH, CHANNELS, HIDDEN) if kind == "PatchEmbedding" else (WORDS, HIDDEN)
        layer = getattr(col_nn, f"{kind}{suffix}")(*sizes)
        with pytest.raises(ValueError, match=f"{kind}{suffix} takes the whole batch .* given different ones"):
            layer(col_nn.partition_batch(x))
        layer(x)
        for _ in range(2):  # the second call is compared as well, again if it was refused
            with pytest.raises(ValueError, match=r"takes the whole batch .* given different ones"):
                layer(col_nn.partition_batch(x))
        with pytest.raises(ValueError, match="a batch of 3 rows is shared by"):
            layer(x[:3])
        general = col_nn.PatchEmbedding if kind == "PatchEmbedding" else col_nn.Embedding
        torch.testing.assert_close(layer(x), general.forward(layer, col_nn.partition_batch(x)))
    with pytest.raises(
        TypeError, match=r"flatten is True or False and dtype a torch.dtype or None, got flatten"
    ):
        getattr(col_nn, f"PatchEmbedding{suffix}")(IMAGE, PATCH, CHANNELS, HIDDEN, torch.float32)


@pytest.mark.parametrize("name", TENSOR)
def test_named_layers_train_like_torch(name: str) -> None:
    spawn(_train, TENSOR[name][0]["size"], name=name)
