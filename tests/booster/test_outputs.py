"""Models that write to their output through views, whose nodes torch makes anew: hooks on them must not touch
the old ones.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))  # units of FSDP

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.gelu(block(x).relu_())  # of three dims: a view
        y = self.blocks[0](x)
        y[:, 0] = 0
        y[..., :2].mul_(2)
        return y


def check_masked(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    serial, x = Masked(), torch.randn(2, 3, 8)
    expected = copy.deepcopy(serial)
    expected(x).square().mean().backward()
    weights = {n: p.detach() - p.grad for n, p in expected.named_parameters()}  # type: ignore[operator]
    for plugin in (
        TorchDDPPlugin(static_graph=True),
        TorchFSDPPlugin(),
        LowLevelZeroPlugin(precision="fp32"),
        GeminiPlugin("cpu", precision="fp32"),
    ):
        model, booster = (
            copy.deepcopy(serial),
            Booster(None if isinstance(plugin, GeminiPlugin) else "cpu", plugin=plugin),
        )
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        for name, found in model.state_dict(
            **({"only_rank_0": False} if "Gemini" in name_of(plugin) else {})
        ).items():
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(
                whole, weights[name], msg=lambda m, p=plugin, n=name: f"{name_of(p)} {n}: {m}"
            )


def name_of(plugin: Plugin) -> str:
    return type(plugin).__name__


def test_outputs_that_were_written_to_through_views() -> None:
    spawn(check_masked, 2)
