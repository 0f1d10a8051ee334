"""Every layer in every mode equals torch's own: values, gradients of the input and of all parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.mesh import Layout, Mesh
from colossalai.nn.layer.classifier import VocabParallelClassifier, WholeClassifier
from colossalai.nn.layer.embedding import VocabParallelEmbedding, WholeEmbedding
from colossalai.nn.modes import TensorParallel
from colossalai.testing import spawn
from tests.nn.layer.world import (
    BATCH,
    HIDDEN,
    INNER,
    MODES,
    SEQUENCE,
    compare,
    copy_to_serial,
    size,
    start,
)

VOCAB = 37  # prime: no mode cuts it evenly


def stream(features: int) -> torch.Tensor:
    return torch.randn(BATCH, SEQUENCE, features)


def check_linear(tp: TensorParallel, mesh: Mesh) -> None:
    for role, k, n in (("expand", HIDDEN, INNER), ("contract", INNER, HIDDEN)):
        layer = col_nn.Linear(k, n, role=role, tp=tp, mesh=mesh)
        serial = nn.Linear(k, n)
        copy_to_serial(layer, serial, mesh)
        x, y = (tp.hidden, tp.inner) if role == "expand" else (tp.inner, tp.hidden)
        compare(layer, serial, stream(k), x, y, mesh)
        compare(layer.requires_grad_(), serial, torch.randn(BATCH, k), x, y, mesh)
        compare(layer, serial, torch.randn(BATCH, SEQUENCE, 2, k), x, y, mesh)


def check_fused(tp: TensorParallel, mesh: Mesh) -> None:
    layer = col_nn.Linear(HIDDEN, 3 * HIDDEN, role="expand", fused=3, tp=tp, mesh=mesh)
    serial = nn.Linear(HIDDEN, 3 * HIDDEN)
    copy_to_serial(layer, serial, mesh)
    for block in range(3):  # each block is cut by itself
        compare(
            lambda x, b=block: layer(x).chunk(3, -1)[b],
            lambda x, b=block: serial(x).chunk(3, -1)[b],
            stream(HIDDEN),
            tp.hidden,
            tp.inner,
            mesh,
        )


def check_options(tp: TensorParallel, mesh: Mesh) -> None:
    layer = col_nn.Linear(HIDDEN, INNER, role="expand", gather_output=True, tp=tp, mesh=mesh)
    serial = nn.Linear(HIDDEN, INNER)
    copy_to_serial(layer, serial, mesh)
    rows = Layout((*tp.inner.dims[:-1], ()))
    compare(layer, serial, stream(HIDDEN), tp.hidden, rows, mesh)
    layer = col_nn.Linear(HIDDEN, INNER, role="expand", skip_bias_add=True, tp=tp, mesh=mesh)
    copy_to_serial(layer, serial, mesh)
    compare(lambda x: sum(layer(x)), serial, stream(HIDDEN), tp.hidden, tp.inner, mesh)
    assert layer.bias.grad is not None
    if tp.mode == "1d":
        layer = col_nn.Linear(INNER, HIDDEN, role="contract", parallel_input=False, tp=tp, mesh=mesh)
        serial = nn.Linear(INNER, HIDDEN)
        copy_to_serial(layer, serial, mesh)
        compare(layer, serial, stream(INNER), Layout((*tp.inner.dims[:-1], ())), tp.hidden, mesh)


def check_norms(tp: TensorParallel, mesh: Mesh) -> None:
    for layer, serial in (
        (col_nn.LayerNorm(HIDDEN, tp=tp, mesh=mesh), nn.LayerNorm(HIDDEN)),
        (col_nn.LayerNorm(HIDDEN, bias=False, tp=tp, mesh=mesh), nn.LayerNorm(HIDDEN, bias=False)),
        (col_nn.RMSNorm(HIDDEN, tp=tp, mesh=mesh), nn.RMSNorm(HIDDEN)),
    ):
        nn.init.normal_(serial.weight)
        layer = type(layer).from_native(serial, tp=tp, mesh=mesh)
        x = stream(HIDDEN) + 5  # a mean that E[x^2] - mean^2 would suffer from
        compare(layer, serial, x, tp.hidden, tp.hidden, mesh)


class Added(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table(torch.arange(SEQUENCE))


def check_embedding(tp: TensorParallel, mesh: Mesh) -> None:
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE))
    rest = Layout((tp.hidden.dims[0], ()))
    for kind in (VocabParallelEmbedding, WholeEmbedding):
        layer = kind(VOCAB, HIDDEN, padding_idx=2, tp=tp, mesh=mesh)
        serial = nn.Embedding(VOCAB, HIDDEN, padding_idx=2)
        copy_to_serial(layer, serial, mesh)
        compare(layer, serial, ids, rest, tp.hidden, mesh)
        # positions, which serve all rows
        words = stream(HIDDEN)
        layer, serial = kind(SEQUENCE, HIDDEN, tp=tp, mesh=mesh), nn.Embedding(SEQUENCE, HIDDEN)
        copy_to_serial(layer, serial, mesh)
        compare(Added(layer), Added(serial), words, tp.hidden, tp.hidden, mesh)


def check_classifier(tp: TensorParallel, mesh: Mesh) -> None:
    for kind in (VocabParallelClassifier, WholeClassifier):
        for tied in (False, True):
            table = {VocabParallelClassifier: VocabParallelEmbedding, WholeClassifier: WholeEmbedding}[kind]
            weight = table(VOCAB, HIDDEN, tp=tp, mesh=mesh).weight if tied else None
            layer = kind(HIDDEN, VOCAB, weight, tp=tp, mesh=mesh)
            serial = nn.Linear(HIDDEN, VOCAB)
            copy_to_serial(layer, serial, mesh)
            compare(layer, serial, stream(HIDDEN), tp.hidden, layer.logits, mesh, uneven=True)
            compare(layer, serial, torch.randn(BATCH, HIDDEN), tp.hidden, layer.logits, mesh, uneven=True)
    layer = VocabParallelClassifier(HIDDEN, VOCAB, gather_output=True, tp=tp, mesh=mesh)
    copy_to_serial(layer, serial, mesh)
    compare(layer, serial, stream(HIDDEN), tp.hidden, layer.logits, mesh)


def check_patches(tp: TensorParallel, mesh: Mesh) -> None:
    # 3 x 3 patches and the class token are 10 tokens
    layer = col_nn.PatchEmbedding(6, 2, 3, HIDDEN, tp=tp, mesh=mesh)
    serial = col_nn.VanillaPatchEmbedding(6, 2, 3, HIDDEN)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    copy_to_serial(layer, serial, mesh)
    images = torch.randn(BATCH, 3, 6, 6)
    expected = serial(images)
    assert expected.shape == (BATCH, 10, HIDDEN)
    reference = nn.functional.conv2d(images, serial.weight, serial.bias, 2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(expected[:, 1:], reference + serial.pos_embed[:, 1:])
    torch.testing.assert_close(
        expected[:, 0], (serial.cls_token + serial.pos_embed[:, :1])[0].expand(BATCH, -1)
    )
    rest = Layout((tp.hidden.dims[0], (), (), ()))
    compare_images(layer, serial, images, rest, tp, mesh)


def compare_images(layer: nn.Module, serial: nn.Module, images: torch.Tensor, rest: Layout, tp, mesh) -> None:
    class FromRows(nn.Module):
        """Rows of pixels in, so that the input has a batch and features only."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x.view(-1, 3, 6, 6))

    whole_pixels = Layout((tp.hidden.dims[0], (), ()))
    compare(FromRows(layer), FromRows(serial), images.flatten(1), whole_pixels, tp.hidden, mesh)


CHECKS = (
    check_linear,
    check_fused,
    check_options,
    check_norms,
    check_embedding,
    check_classifier,
    check_patches,
)


def _check(rank: int, world_size: int, port: int, name: str) -> None:
    tp, mesh = start(rank, world_size, port, name)
    for check in CHECKS:
        check(tp, mesh)


@pytest.mark.parametrize("name", MODES)
def test_layers_equal_torch(name: str) -> None:
    spawn(_check, size(name), name=name)
