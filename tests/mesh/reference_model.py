"""A small language model, to hold the core and its layers against plain torch in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, RandomStream, initialize
from colossalai.nn.layer.classifier import VocabParallelClassifier
from colossalai.nn.layer.embedding import VocabParallelEmbedding
from colossalai.nn.modes import TensorParallel
from colossalai.testing.parity import PlacedRun, Problem

SEED = 7
IGNORED = -100


@dataclass(frozen=True)
class Sizes:
    vocab: int = 32
    hidden: int = 16
    heads: int = 4
    batch: int = 8
    sequence: int = 4
    layers: int = 2
    dropout: float = 0.1
    tied: bool = False
    device: str = "cpu"


class Model(nn.Module):
    """Written once; the layer factories decide whether it is serial or parallel."""

    def __init__(self, sizes: Sizes, make: Factories) -> None:
        super().__init__()
        h = sizes.hidden
        self.sizes, self.dropout = sizes, make.dropout
        self.embedding = make.embedding(sizes.vocab, h)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": make.norm(h),
                    "qkv": make.linear(h, 3 * h, True, 3),
                    "proj": make.linear(h, h, False, 1),
                    "norm2": make.norm(h),
                    "fc1": make.linear(h, 4 * h, True, 1),
                    "fc2": make.linear(4 * h, h, False, 1),
                }
            )
            for _ in range(sizes.layers)
        )
        self.norm = make.norm(h)
        self.head = make.head(h, sizes.vocab, self.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        width = self.sizes.hidden // self.sizes.heads
        x = self.embedding(ids)
        for block in self.blocks:
            qkv = block["qkv"](block["norm1"](x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in qkv)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.dropout(block["proj"](y))
            x = x + self.dropout(block["fc2"](F.gelu(block["fc1"](block["norm2"](x)))))
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Factories:
    embedding: Callable[[int, int], nn.Module]
    norm: Callable[[int], nn.Module]
    linear: Callable[[int, int, bool, int], nn.Module]
    head: Callable[[int, int, nn.Module], nn.Module]
    dropout: Callable[[Tensor], Tensor]


def serial_model(sizes: Sizes) -> Model:
    stream = RandomStream(SEED, "dropout")

    def head(hidden: int, vocab: int, embedding: nn.Module) -> nn.Module:
        layer = nn.Linear(hidden, vocab, bias=False)
        if sizes.tied:
            layer.weight = embedding.weight
        return layer

    make = Factories(
        embedding=nn.Embedding,
        norm=nn.LayerNorm,
        linear=lambda k, n, expand, fused: nn.Linear(k, n),
        head=head,
        dropout=lambda x: stream.dropout(x, sizes.dropout),
    )
    return initialize(Model(sizes, make).to(sizes.device), SEED)


def parallel_model(sizes: Sizes, tp: TensorParallel, mesh: Mesh) -> Model:
    stream, here = RandomStream(SEED, "dropout"), {"tp": tp, "mesh": mesh}
    make = Factories(
        embedding=lambda vocab, h: VocabParallelEmbedding(vocab, h, **here),
        norm=lambda h: col_nn.LayerNorm(h, **here),
        linear=lambda k, n, expand, fused: col_nn.Linear(
            k, n, role="expand" if expand else "contract", fused=fused, **here
        ),
        head=lambda h, vocab, emb: VocabParallelClassifier(
            h, vocab, emb.weight if sizes.tied else None, bias=False, **here
        ),
        dropout=lambda x: stream.dropout(x, sizes.dropout, mesh, tp.hidden),
    )
    with torch.device("meta"):
        model = Model(sizes, make)
    return initialize(model, SEED, mesh, sizes.device)


def problem(sizes: Sizes, steps: int = 2) -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        ids, target = torch.randint(0, sizes.vocab, (2, sizes.batch, sizes.sequence), generator=generator)
        target[0, :3] = target[-1, 1] = IGNORED  # ranks hold different numbers of valid tokens
        batches.append((ids.to(sizes.device), target.to(sizes.device)))
    return Problem(
        build=lambda: serial_model(sizes),
        batches=batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    )


def plan(problem: Problem, tp: TensorParallel, sizes: Sizes) -> PlacedRun:
    dist.init_process_group("gloo")
    mesh = Mesh(tp.axes, sizes.device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids = col_nn.partition_batch(batch[0], tp=tp, mesh=mesh)
        return col_nn.CrossEntropyLoss(ignore_index=IGNORED, tp=tp, mesh=mesh)(model(ids), batch[1])

    return PlacedRun(problem, parallel_model(sizes, tp, mesh), mesh, loss)
