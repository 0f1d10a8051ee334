"""autograd may come by a parameter and bring no gradient: then it has none, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.testing import spawn
from tests.booster.plans import launch

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "fsdp": TorchFSDPPlugin,
    "zero-1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero-2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", placement_policy="cpu"),
}
PASSES = (False, True, False)
"""Whether the side branch learns in a step."""


class _Sum(torch.autograd.Function):
    """A sum of which only the first part learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.learns = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        side = self.side(x).tanh()
        return self.last(x + side if self.learns else _Sum.apply(x, side))  # type: ignore[no-untyped-call]


def _train(part: slice, plugin: Plugin | None, hook: Callable[[Tensor], None] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net()
    if hook is not None:
        net.side.bias.register_post_accumulate_grad_hook(hook)
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5))
    device = booster.accelerator.device
    norms = []
    for step, learns in enumerate(PASSES):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        model.unwrap().learns = learns
        booster.backward(model(x[part].to(device)).square().mean(), optimizer)
        norms.append(optimizer.clip_grad_by_norm(1.0))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(norms).cpu(), *(whole(value).cpu() for value in model.state_dict().values())]


def _compare(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    expected = _train(slice(None), None)
    for plan, plugin in PLUGINS.items():
        ours = _train(slice(rank, None, world_size), plugin())
        assert rank or len(ours) == len(expected)  # Gemini's first rank has the state_dict
        for value, serial in zip(ours, expected, strict=False):
            torch.testing.assert_close(value, serial, rtol=1e-5, atol=1e-6, msg=lambda m, p=plan: f"{p}: {m}")


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_custom_functions_may_return_no_gradient() -> None:
    spawn(_compare, 2)


def _waits(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    with pytest.raises(RuntimeError, match=r"side.weight, side.bias.*find_unused_parameters=True"):
        _train(slice(None), TorchDDPPlugin())

    def take(p: Tensor) -> None:
        p.grad = None

    for plan in ("ddp", "zero-1"):  # where a hook of the script may have taken it, it is not lost in silence
        with pytest.raises(RuntimeError, match=r"shape \(6,\) has used up its gradient"):
            _train(slice(None), PLUGINS[plan](), take)


def test_ddp_names_what_it_waits_for() -> None:
    spawn(_waits, 2)


def _alone(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    ours, expected = _train(slice(None), TorchDDPPlugin()), _train(slice(None), None)
    assert all(map(torch.equal, ours, expected))


def test_a_single_replica_waits_for_nothing() -> None:
    spawn(_alone, 1)


def _cut(rank: int, world_size: int, port: int) -> None:
    plan = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(plan, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    ours, expected = _train(slice(None), TorchDDPPlugin()), _train(slice(None), None)
    assert all(map(torch.equal, ours, expected))


def test_copies_over_tensor_ranks_may_all_be_without() -> None:
    spawn(_cut, 2)
