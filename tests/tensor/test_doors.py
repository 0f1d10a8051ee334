"""ColoParameters that are cut, at the doors of training: no door takes pieces for copies of one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import ColossalaiOptimizer
from colossalai.tensor import ColoInitContext, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from colossalai.testing import spawn
from colossalai.utils import clip_grad_norm_fp32
from tests.tensor.world import start, whole

BATCH = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
MAX_NORM = 0.1
REFUSED = r"would take the ranks \[0, 1\] for replicas and average 0.weight.*parallel=dict\(tensor=.*ColoDDP"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def cut(pg: ProcessGroup) -> nn.Sequential:
    with ColoInitContext(default_pg=pg):
        model = build()
    products, parts = ComputeSpec(ComputePattern.TP1D), [pg.tp_world_size()]
    for param, dim in ((model[0].weight, 0), (model[0].bias, 0), (model[2].weight, -1)):
        param.set_tensor_spec(ShardSpec([dim], parts), products)  # type: ignore[operator]
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss(model: nn.Module) -> torch.Tensor:
    return model(BATCH).square().sum()


def _refused(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    pg = ProcessGroup(tp_degree=2)
    for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(precision="fp32"), TorchFSDPPlugin()):
        model = cut(pg)
        with pytest.raises(ValueError, match=f"{type(plugin).__name__} {REFUSED}"):
            Booster(plugin=plugin).boost(model, sgd(model))
    for config in ({}, {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}):
        gpc.load_config(config)
        model = cut(pg)
        with pytest.raises(ValueError, match=REFUSED):
            colossalai.initialize(model, sgd(model), loss, verbose=False)
        for a, b in zip(build().parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(b), a.data)
    # copies on dp ranks are replicas
    model = cut(ProcessGroup(dp_degree=2))
    Booster(plugin=TorchDDPPlugin()).boost(model, sgd(model))
    _clipped(pg)


def _known(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "clip_grad_norm": MAX_NORM}
    colossalai.launch(config, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    pg = ProcessGroup(tp_degree=2)
    model, serial = cut(pg), build()
    with pytest.raises(ValueError, match=r"one of shape \(4, 4\) is a ColoParameter that is cut; use Gemini"):
        Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(model, sgd(model))
    engine, *_ = colossalai.initialize(model, sgd(model), loss, verbose=False)
    engine.train()
    engine.backward(loss(engine))
    engine.step()
    loss(serial).backward()
    nn.utils.clip_grad_norm_(serial.parameters(), MAX_NORM)
    sgd(serial).step()
    for a, b in zip(serial.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a.data)
    _clipped(pg)


def _clipped(pg: ProcessGroup) -> None:
    """Every way to clip by hand takes the norm of the whole model."""
    serial = build()
    loss(serial).backward()
    expected = nn.utils.clip_grad_norm_(serial.parameters(), MAX_NORM)
    ways = {
        "clip_grad_norm_fp32": lambda m: clip_grad_norm_fp32(m.parameters(), MAX_NORM),
        "ColossalaiOptimizer": lambda m: ColossalaiOptimizer(sgd(m)).clip_grad_norm(m, MAX_NORM),
        "OptimizerWrapper": lambda m: OptimizerWrapper(sgd(m)).clip_grad_by_norm(MAX_NORM),
    }
    for name, clip in ways.items():
        model = cut(pg)
        loss(model).backward()
        torch.testing.assert_close(torch.as_tensor(clip(model)), expected, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(model[2].bias.grad, serial[2].bias.grad)


def test_pieces_are_no_replicas() -> None:
    spawn(_refused, 2)


def test_launched_mesh_knows_the_pieces() -> None:
    spawn(_known, 2)
