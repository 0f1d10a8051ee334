"""Documented places and names of ``colossalai.nn`` that are fronts of what lies elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import colossalai
from colossalai.global_variables import tensor_parallel_env
from colossalai.nn import _ops
from colossalai.nn.layer.base_layer import ParallelLayer
from colossalai.nn.layer.colossalai_layer import ColossalaiModule, Linear
from colossalai.nn.layer.utils import _ntuple
from colossalai.nn.parallel.layers import (
    ColoEmbedding,
    ColoLinear,
    ColoModule,
    check_colo_module,
    get_colo_module,
    init_colo_module,
    is_colo_module,
    register_colo_module,
)
from colossalai.tensor import ColoInitContext, ComputePattern, ComputeSpec, ProcessGroup, ShardSpec
from colossalai.testing import spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from tests.tensor.gpt2 import ColoRun
from tests.tensor.net import Net, problem

TP1D = ComputePattern.TP1D


def plan(problem: Problem, mode: str) -> ColoRun:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    with ColoInitContext():
        model = problem.build()
    pg = ProcessGroup(tp_degree=2)
    assert isinstance(model, Net)
    if mode == "mixed":
        init_colo_module(model.up, ComputeSpec(TP1D), pg, mode="col")
        init_colo_module(model.down, ComputeSpec(TP1D), pg)
    else:  # the table is also the head: its way is chosen once
        for part in (model.table, model.up, model.down):
            init_colo_module(part, ComputeSpec(TP1D), pg, mode=mode)
    check_colo_module(model, pg)
    return ColoRun(problem, model, pg)


@pytest.mark.parametrize("mode", ["row", "col", "mixed"])
def test_modules_cut_by_a_name_equal_the_serial_model(mode: str) -> None:
    assert_equal_to_serial(problem, partial(plan, mode=mode), 2)


def check_cuts(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    pg, spec = ProcessGroup(tp_degree=2), ComputeSpec(TP1D)
    with ColoInitContext():
        model = nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8)))
    init_colo_module(model, spec, pg)
    assert model[0].weight.shape == (3, 4)
    assert model[1].weight.shape == (4,)
    assert model[2][0].weight.shape == (8, 2)
    assert model[2][0].bias.shape == (8,)
    model[2][0].bias.set_tensor_spec(ShardSpec([0], [2]), spec)
    with pytest.raises(ValueError, match=r"module '2.0' \(Linear\) are cut along the dims .*bias.*'row'"):
        check_colo_module(model, pg)
    with pytest.raises(ValueError, match=r"ColoLinear has no mode 'diagonal' for .*; it has 'row', 'col'"):
        init_colo_module(model[2], spec, pg, mode="diagonal")
    with pytest.raises(TypeError, match="parameter 'weight' is a Parameter, no ColoParameter; build the"):
        init_colo_module(nn.Linear(4, 4), spec, pg)


def test_how_modules_are_cut() -> None:
    spawn(check_cuts, 2)


def test_kinds_of_modules() -> None:
    assert isinstance(get_colo_module(nn.Linear(2, 2)), ColoLinear)
    assert isinstance(get_colo_module(nn.Embedding(2, 2)), ColoEmbedding)
    assert not is_colo_module(nn.Bilinear(2, 2, 2))
    own = ColoModule()
    own.register(TP1D, {"weight": 1}, "inner")
    register_colo_module(nn.Bilinear, own)
    assert get_colo_module(nn.Bilinear(2, 2, 2)) is own
    assert own.cuts(TP1D, "inner") == {"weight": 1}
    with pytest.raises(TypeError, match="needs a ColoModule, got 3"):
        register_colo_module(nn.Bilinear, 3)  # type: ignore[arg-type]


def test_functions_of_colotensors_are_those_of_torch() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(_ops.colo_linear(x, w), x @ w.T)
    torch.testing.assert_close(_ops.colo_addmm(torch.ones(3, 5), x, w.T), x @ w.T + 1)
    assert _ops.colo_view(x, 2, 6).shape == (2, 6)
    before = tensor_parallel_env.parallel_input_1d
    with pytest.warns(UserWarning, match="set_parallel_input has no effect on what is computed"):
        _ops.set_parallel_input(True)
    assert _ops.get_parallel_input() is True
    tensor_parallel_env.parallel_input_1d = before


def test_a_module_around_a_layer() -> None:
    layer = Linear(4, 3)
    wrapped = ColossalaiModule(layer, kind="mine")
    x = torch.randn(2, 4)
    torch.testing.assert_close(wrapped(x), layer(x))
    assert wrapped.kind == "mine"
    assert isinstance(layer, ParallelLayer)
    with ParallelLayer.use_local_state_dict():
        assert layer.state_dict().keys() == {"weight", "bias"}


def test_tuples() -> None:
    assert _ntuple(3)(2) == (2, 2, 2)
    assert _ntuple(2)([4, 5]) == (4, 5)
    with pytest.raises(ValueError, match=r"expected one value or 3, got \(1, 2\)"):
        _ntuple(3)((1, 2))
