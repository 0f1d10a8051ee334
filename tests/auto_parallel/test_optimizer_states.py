"""The states and the step of the optimizer that a plan counts are those of a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from colossalai.auto_parallel.checkpoint import CheckpointPlanner, auto_checkpoint
from colossalai.auto_parallel.checkpoint.share import state_bytes
from colossalai.utils.memory.live_bytes import LiveBytes


class Layers(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
            for _ in range(4)
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[Layers], Optimizer]] = {
    "momentum of a group": lambda m: optim.SGD([{"params": m.parameters(), "momentum": 0.9}], lr=0.01),
    "amsgrad of a group": lambda m: optim.AdamW([{"params": m.parameters(), "amsgrad": True}]),
    "two groups": lambda m: optim.SGD(
        [{"params": _matrices(m), "momentum": 0.9}, {"params": [p for p in m.parameters() if p.ndim < 2]}]
    ),
    "a part": lambda m: optim.AdamW(m.head.parameters()),
    "matrices only": lambda m: optim.Muon(_matrices(m)),
    "names": lambda m: optim.AdamW(m.named_parameters()),
    "fused": lambda m: optim.AdamW(m.parameters(), fused=True),
    "a rate in a tensor": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_groups(name: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.rand(64, 32)
    optimizer = OPTIMIZERS[name](model)
    planner = CheckpointPlanner(model, x, optimizer=optimizer, device="cpu")
    with LiveBytes(block=512) as memory:
        memory.hold((*model.parameters(), x))
        for _ in range(2):
            memory.peak = memory.now
            model(x).sum().backward()
            optimizer.step()
            model.zero_grad()
    assert 0.98 * planner.whole <= memory.peak <= planner.whole
    assert any("not in the optimizer" in note for note in planner.notes) == (
        name in ("a part", "matrices only")
    )


def test_optimizers_that_cannot_be_counted_are_refused() -> None:
    model, x = Layers(), torch.rand(64, 32)
    with pytest.raises(ValueError, match=r"^auto_checkpoint cannot build another LBFGS to count its states"):
        auto_checkpoint(model, x, "1 GiB", optimizer=optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"SparseAdam cannot make a step .*does not support dense gradients"):
        auto_checkpoint(model, x, "1 GiB", optimizer=optim.SparseAdam(model.parameters()))
    with pytest.raises(ValueError, match=r"\(SGD\) holds no parameter of the model \(Layers\)"):
        auto_checkpoint(model, x, "1 GiB", optimizer=optim.SGD(Layers().parameters()))


def test_an_optimizer_of_a_criterion_too() -> None:
    model, criterion = Layers(), nn.PReLU(8)
    optimizer = optim.AdamW([*model.parameters(), *criterion.parameters()])
    planner = CheckpointPlanner(model, torch.rand(64, 32), optimizer=optimizer, device="h200")
    alone = CheckpointPlanner(
        model, torch.rand(64, 32), optimizer=optim.AdamW(model.parameters()), device="h200"
    )
    assert planner.played["keep"].states > alone.played["keep"].states


def test_states_that_plugins_divide_are_those_of_groups() -> None:
    model = Layers()
    momentum = optim.SGD([{"params": model.parameters(), "momentum": 0.9}])
    assert state_bytes(model, momentum) >= sum(p.nbytes for p in model.parameters())
    assert state_bytes(model, optim.SGD(model.parameters())) == 0
