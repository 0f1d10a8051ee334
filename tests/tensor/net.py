"""A small model with most of what models have, and plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from colossalai.tensor import ColoParameter, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from colossalai.testing.parity import Problem

HIDDEN = 8


class Net(nn.Module):
    """A table that is also the head, a pair of layers, a normalization, a buffer, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, HIDDEN, padding_idx=1)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 10, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((), 0.5))
        self.frozen = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        nn.init.orthogonal_(self.down.weight)  # after its own constructor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.frozen
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        return self.head(x)


def build() -> Net:
    torch.manual_seed(4)
    return Net()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


# how each parameter lies: dim of the cut, whether the output is made whole
PLANS: dict[str, dict[str, tuple[int, bool]]] = {
    "megatron": {
        "up.weight": (0, False),
        "up.bias": (0, False),
        "down.weight": (1, True),
        "table.weight": (0, False),
    },
    "hidden": {
        "up.weight": (0, True),
        "down.weight": (0, True),
        "down.bias": (0, True),
        "table.weight": (1, True),
    },
    "nothing": {},
}


def lay_out(model: nn.Module, pg: ProcessGroup, plan: str) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, ColoParameter)
        param.set_process_group(pg)
        if name in PLANS[plan]:
            dim, replicate = PLANS[plan][name]
            param.set_tensor_spec(ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
            assert param.compute_spec is not None
            param.compute_spec.set_output_replicate(replicate)


def problem(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None) -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 10, (4, 6), generator=generator) for _ in range(3)]
    if optimizer is None:
        return Problem(build=build, batches=batches, loss=loss)
    return Problem(
        build=build,
        batches=batches,
        loss=loss,
        optimizer=lambda ps: optimizer([p for p in ps if p.requires_grad]),
    )
