"""A layer with experts, and how it is run on one rank and on several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.context.moe_context import MOE_CONTEXT
from colossalai.core import global_context as gpc
from colossalai.mesh import Layout, move, redistribute, replicated, serial_tensor
from colossalai.mesh.mesh import DATA_AXES
from colossalai.nn.layer.moe import (
    Experts,
    FFNExperts,
    MoeExperts,
    MoeLayer,
    MoeRouter,
    NormalNoiseGenerator,
    TPExperts,
    UniformNoiseGenerator,
)
from colossalai.nn.loss import MoeLoss
from colossalai.nn.sequence import current_sequence
from colossalai.pipeline.tied import synchronize_gradients

WIDTH, INNER, SAMPLES, LENGTH = 8, 16, 8, 7


class FFN(nn.Module):
    """An expert of the user's own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@dataclass(frozen=True)
class Case:
    experts: str = "ffn"
    number: int = 4
    k: int = 2
    capacity: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()
    noise: str | None = None
    padded: bool = False
    """Whether the last tokens of some samples are padding."""
    length: int = LENGTH

    def build(self) -> MoeLayer:
        torch.manual_seed(0)
        noise = {
            None: None,
            "normal": NormalNoiseGenerator(2),
            "uniform": UniformNoiseGenerator(0.5),
        }[self.noise]
        router = MoeRouter(self.k, self.capacity, min_capacity=0, noisy_func=noise, **dict(self.options))
        return MoeLayer(WIDTH, self.number, router, self._experts()).double()

    def _experts(self) -> MoeExperts:
        if self.experts == "any":
            return Experts(expert=FFN, num_experts=self.number, width=WIDTH, inner=INNER)
        if self.experts == "gated":
            return FFNExperts(self.number, WIDTH, INNER, torch.nn.functional.silu, gated=True, bias=False)
        kind = TPExperts if self.experts == "tp" else FFNExperts
        layer = kind(self.number, WIDTH, INNER)
        assert layer.b1 is not None
        assert layer.b2 is not None
        layer.b1.data.fill_(0.2)  # zero at the start, of which a test sees nothing
        layer.b2.data.fill_(0.7)
        return layer


@dataclass
class Seen:
    """The results of a run, as the serial model has them."""

    output: Tensor
    loss: Tensor
    chosen: Tensor
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    input_grad: Tensor
    load: Tensor
    dropped: int
    entropy: Tensor


def batch(length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    real = torch.arange(LENGTH) < torch.tensor([7, 5, 7, 1, 6, 7, 0, 7])[:, None]
    return x[:, :length], real[:, :length]


def seen(case: Case, samples: slice | None = None) -> Seen:
    """The layer on all samples, or on the ranks of a launched job, each of which gets ``samples``."""
    layer = case.build()
    x, real = batch(case.length)
    x, real = x[samples or slice(None)], real[samples or slice(None)]
    x = x.clone().requires_grad_()
    sequence = current_sequence() if samples is not None else None
    rest = replicated(3) if layer.plain else layer.tp.hidden
    cut = redistribute(x, replicated(3), rest, layer._mesh) if sequence is None else sequence.cut(x)
    mask = real if case.padded else torch.ones_like(real)
    own = move(mask, replicated(2), Layout(rest.dims[:2]), gpc.mesh) if samples is not None else mask
    if sequence is not None:
        own = sequence.cut(mask.long()).bool()
    torch.manual_seed(5)
    routings: list[Any] = []
    layer.router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    y = layer(cut, own if case.padded or sequence is not None else None)
    y = (
        redistribute(y, rest, replicated(3), layer._mesh)
        if sequence is None
        else sequence.gather(y, case.length)
    )
    loss = MoeLoss(0.5, nn.MSELoss, z_weight=0.1)(y, torch.ones_like(y))
    loss.backward()
    (routing,) = routings
    if samples is not None:
        synchronize_gradients(layer.parameters(), gpc.mesh)
    kept = routing.kept if routing.kept is not None else torch.ones_like(routing.chosen, dtype=torch.bool)
    decisions = torch.where(kept, routing.chosen, -1).view(len(x), -1, case.k).double()
    if sequence is not None:
        decisions = sequence.gather(decisions, case.length)
    assert x.grad is not None
    mesh = gpc.mesh if samples is not None else None
    return Seen(
        y.detach(),
        loss.detach(),
        decisions,
        {name: _whole(p.detach(), p, mesh) for name, p in layer.named_parameters()},
        {name: _whole(p.grad, p, mesh) for name, p in layer.named_parameters()},  # type: ignore[arg-type]
        x.grad,
        routing.loads.tokens,
        int(routing.loads.dropped),
        routing.loads.entropy,
    )


def _whole(value: Tensor, param: Tensor, mesh: Any) -> Tensor:
    return value if mesh is None else serial_tensor(value, param, mesh)


def launched(parallel: dict[str, Any]) -> slice:
    """Launch, and give the samples of this rank."""
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh = gpc.mesh
    data = [axis for axis in mesh.size if axis in DATA_AXES]
    ranks = mesh.ranks(*data)
    own, each = ranks.index(mesh.rank), SAMPLES // len(ranks)
    MOE_CONTEXT.reset_loss()
    return slice(own * each, (own + 1) * each)
