"""On a GPU: with one rank the layers cost what torch's cost, and modes on one shared GPU equal torch."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, shard
from colossalai.testing import spawn
from tests.nn.layer.world import MODES, close, size, whole

pytestmark = pytest.mark.gpu


class Tower(nn.Module):
    """Layer norms and MLPs, of torch's layers or of ours."""

    def __init__(
        self, linear: type[nn.Module], norm: type[nn.Module], dim: int = 1024, depth: int = 8
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": norm(dim), "up": linear(dim, 4 * dim), "down": linear(4 * dim, dim)})
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](nn.functional.gelu(block["up"](block["norm"](x))))
        return x


def towers() -> dict[str, nn.Module]:
    return {
        "torch": Tower(nn.Linear, nn.LayerNorm).cuda().bfloat16(),
        "ours": Tower(col_nn.Linear, col_nn.LayerNorm).cuda().bfloat16(),
    }


def step_time(model: nn.Module, x: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    model(x).sum().backward()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_one_rank_costs_nothing() -> None:
    models, x = towers(), torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(60):  # in turn, so that a change of the clock meets both
        for name, model in models.items():
            t = step_time(model, x)
            if i >= 10:
                times[name].append(t)
    ratio = statistics.median(times["ours"]) / statistics.median(times["torch"])
    print(f"step time of our layers / torch's: {ratio:.4f}")
    assert ratio <= 1.02


def test_one_graph_for_the_compiler() -> None:
    model = towers()["ours"]
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(8, 64, 1024, device="cuda", dtype=torch.bfloat16)
    compiled(x).sum().backward()
    close(compiled(x), model(x), "compiled", 2e-2)


def _modes(rank: int, world_size: int, port: int, name: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    tp = MODES[name]
    mesh = Mesh(tp.axes, "cuda")
    torch.manual_seed(0)
    up = col_nn.Linear(24, 48, role="expand", tp=tp, mesh=mesh)
    down = col_nn.Linear(48, 24, role="contract", tp=tp, mesh=mesh)
    norm = col_nn.LayerNorm(24, tp=tp, mesh=mesh)
    assert up.weight.is_cuda
    serial = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)).cuda()
    with torch.no_grad():
        for layer, other in ((norm, serial[0]), (up, serial[1]), (down, serial[3])):
            for (_, mine), (_, theirs) in zip(
                layer.named_parameters(), other.named_parameters(), strict=True
            ):
                theirs.copy_(whole(mine, mine, mesh))
    x = torch.randn(8, 4, 24, device="cuda")
    expected = serial(x)
    got = down(nn.functional.gelu(up(norm(shard(x, tp.hidden, mesh)))))
    close(got, shard(expected, tp.hidden, mesh), "output", 1e-4)
    expected.square().sum().backward()
    got.square().sum().backward()
    close(whole(up.weight.grad, up.weight, mesh), serial[1].weight.grad, "gradient", 1e-4)


@pytest.mark.parametrize("name", ["1d", "1d-sequence", "2d", "2.5d", "3d"])
def test_modes_on_one_gpu(name: str) -> None:
    spawn(_modes, size(name), name=name)
