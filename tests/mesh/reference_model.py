"""A small language model written once over the core, to hold the core against plain torch in every mode.

The layers are the shortest that are right; the ones for users live in ``colossalai.nn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh import (
    Constant,
    Layout,
    MatmulPlan,
    Mesh,
    Normal,
    RandomStream,
    Uniform,
    collectives,
    initialize,
    local_range,
    local_shape,
    matmul,
    move,
    place,
    redistribute,
    set_init,
    shard,
    use,
)
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
    stream = RandomStream(SEED, "dropout")
    make = Factories(
        embedding=lambda vocab, h: Embedding(vocab, h, tp, mesh),
        norm=lambda h: LayerNorm(h, tp, mesh),
        linear=lambda k, n, expand, fused: Linear(k, n, tp, mesh, expand=expand, fused=fused),
        head=lambda h, vocab, emb: Linear(
            h, vocab, tp, mesh, expand=True, bias=False, weight=emb.weight if sizes.tied else None
        ),
        dropout=lambda x: stream.dropout(x, sizes.dropout, mesh, tp.hidden),
    )
    with torch.device("meta"):
        model = Model(sizes, make)
    return initialize(model, SEED, mesh, sizes.device)


def empty_parameter(shape: tuple[int, ...], layout: Layout, mesh: Mesh, init: object) -> nn.Parameter:
    param = nn.Parameter(torch.empty(local_shape(shape, layout, mesh)))
    place(param, layout, shape)
    set_init(param, init)
    return param


class Linear(nn.Module):
    """The weight is stored (out, in) like the serial one; layouts of products are written (in, out)."""

    def __init__(self, k, n, tp, mesh, *, expand, bias=True, fused=1, weight=None) -> None:
        super().__init__()
        self.mesh = mesh
        x, y = (tp.hidden, tp.inner) if expand else (tp.inner, tp.hidden)
        bound = Uniform(-1 / math.sqrt(k), 1 / math.sqrt(k))
        if weight is None:
            layout = replace(tp.expand if expand else tp.contract, fused=(1, fused)).transposed()
            weight = empty_parameter((n, k), layout, mesh, bound)
        self.weight = weight
        self.plan = MatmulPlan(x, weight.placement.transposed(), y)
        self.bias = None
        if bias:
            self.bias = empty_parameter((n,), Layout((y.dims[-1],), fused=(fused,)), mesh, bound)

    def forward(self, x: Tensor) -> Tensor:
        y = matmul(x, self.weight.t(), self.plan, self.mesh)
        return y if self.bias is None else y + use(self.bias, self.plan.y.rows, self.mesh)


class Embedding(nn.Module):
    """A product with one-hot rows: K is the vocabulary."""

    def __init__(self, vocab, hidden, tp, mesh) -> None:
        super().__init__()
        self.mesh, self.vocab = mesh, vocab
        one_hot = Layout((tp.hidden.dims[0], (), ()))  # ids are cut like the batch; the last dim is virtual
        self.plan = MatmulPlan(one_hot, tp.vocab, tp.hidden, prefer_moving_y=True)
        self.weight = empty_parameter((vocab, hidden), tp.vocab, mesh, Normal())

    def forward(self, ids: Tensor) -> Tensor:
        rest, in_use = (Layout(layout.dims[:-1]) for layout in (self.plan.x, self.plan.x_use))
        ids = redistribute(ids, rest, in_use, self.mesh)
        table = redistribute(self.weight, self.plan.w, self.plan.w_use, self.mesh)
        start, length = local_range(self.vocab, self.plan.w_use.dims[0], self.mesh)
        index = ids - start
        inside = (index >= 0) & (index < length)
        y = F.embedding(index.clamp(0, length - 1), table) * inside.unsqueeze(-1)
        return redistribute(y, self.plan.y_use, self.plan.y, self.mesh)


class LayerNorm(nn.Module):
    def __init__(self, hidden, tp, mesh) -> None:
        super().__init__()
        self.mesh, self.hidden, self.rest = mesh, hidden, tp.hidden
        self.weight = empty_parameter((hidden,), tp.feature, mesh, Constant(1.0))
        self.bias = empty_parameter((hidden,), tp.feature, mesh, Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x - self._mean(x)
        x = x * torch.rsqrt(self._mean(x.square()) + 1e-5)
        return x * use(self.weight, self.rest.rows, self.mesh) + use(self.bias, self.rest.rows, self.mesh)

    def _mean(self, x: Tensor) -> Tensor:
        cut = frozenset(self.rest.dims[-1])
        rows = Layout((*self.rest.dims[:-1], ()))
        # P -> R, not P -> I: each rank goes on to apply the statistic to its own features
        summed = redistribute(
            x.sum(-1, keepdim=True), replace(rows, partial=cut), replace(rows, spread=cut), self.mesh
        )
        return summed / self.hidden


def cross_entropy(logits: Tensor, target: Tensor, layout: Layout, vocab: int, mesh: Mesh) -> Tensor:
    """Mean over the valid tokens of the whole batch; ``logits`` rest in ``layout``."""
    *rows, cut = layout.dims
    start, length = local_range(vocab, cut, mesh)
    peak = logits.detach().amax(-1, keepdim=True)
    for axis in cut:
        peak = collectives.all_reduce(peak, mesh, axis, dist.ReduceOp.MAX)
    logits = logits - peak
    valid = target != IGNORED
    index = torch.where(valid, target, 0) - start
    inside = (index >= 0) & (index < length)
    picked = logits.gather(-1, index.clamp(0, length - 1).unsqueeze(-1)).squeeze(-1) * inside
    # P -> I: from here on every rank of a vocabulary axis does the same arithmetic
    summed = Layout(tuple(rows), partial=frozenset(cut)), Layout(tuple(rows))
    total, picked = (redistribute(t, *summed, mesh) for t in (logits.exp().sum(-1), picked))
    loss = ((total.log() - picked) * valid).sum()
    everyone = Layout((), partial=layout.rows), Layout(())
    return redistribute(loss, *everyone, mesh) / move(valid.sum(), *everyone, mesh)


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
        ids, target = (
            shard(t, Layout((layout.dims[0], ())), mesh)
            for t, layout in zip(batch, (tp.hidden, tp.inner), strict=True)
        )
        return cross_entropy(model(ids), target, tp.inner, sizes.vocab, mesh)

    return PlacedRun(problem, parallel_model(sizes, tp, mesh), mesh, loss)
