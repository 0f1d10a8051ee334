"""The benchmark of the GPT block does what it says: the same math on all sides, and with one rank the same
kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tensor_parallel import BenchmarkBlock, beside_dtensor, grid_beside_line, step, torch_block
from colossalai.testing import spawn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_one_dim_beside_dtensor() -> None:
    # the ranks compare outputs and gradients before they time
    (times, _) = spawn(beside_dtensor, 2, sizes={"tiny": (2, 4, 16, 2)}, repeat=1)
    assert set(times["tiny"]) == {"ours", "peer"}
    assert min(times["tiny"].values()) > 0


def test_two_dims_keep_less_than_one() -> None:
    found = spawn(grid_beside_line, 4, size=(8, 16, 32, 4), repeat=1)[0]
    (_, line), (_, grid) = found["1D"], found["2D"]
    # 1D keeps the stream and what the norms make of it whole on all 4 ranks, 2D cuts everything
    assert grid < 0.7 * line


class Operations(TorchDispatchMode):
    """The operations that reach the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def both(device: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    ours, peer = BenchmarkBlock(32, 4, causal=True).to(device), torch_block(32, 4).to(device)
    peer.load_state_dict(ours.state_dict())
    return ours, peer, torch.randn(2, 8, 32, device=device, requires_grad=True)


@pytest.mark.parametrize("device", DEVICES)
def test_one_rank_runs_the_operations_of_torch(device: str) -> None:
    ours, peer, x = both(device)
    seen = []
    for model in (ours, peer):
        with Operations() as operations:
            y = step(model, x, torch.ones_like(x))
        seen.append((operations.names, y.detach()))
    assert seen[0][0] == seen[1][0]
    assert "aten.addmm.default" in seen[0][0]
    assert torch.equal(seen[0][1], seen[1][1])


@pytest.mark.gpu
def test_one_rank_compiles_to_one_graph_on_the_gpu() -> None:
    ours, peer, x = both("cuda")
    compiled = step(torch.compile(ours, fullgraph=True), x, torch.ones_like(x))
    torch.testing.assert_close(compiled, step(peer, x, torch.ones_like(x)), rtol=1e-3, atol=1e-3)
