"""What Gemini refuses, with words: models and options that it cannot take, and changes that would be lost."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from colossalai.zero import GeminiDDP, GeminiOptimizer, LowLevelZeroOptimizer
from colossalai.zero.gemini import ChunkManager, ConstPlacementPolicy
from tests.zero.gemini.runs import launch


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def small(model: nn.Module, policy: str = "cpu", **options: Any) -> GeminiDDP:
    options = {
        "min_chunk_size_mb": 0.0001,
        "search_range_mb": 0.0001,
        "hidden_dim": 8,
        "dtype": torch.float32,
        **options,
    }
    return GeminiDDP(model, "cpu", policy, **options)


def step(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_capacity": -5}, r"compute_capacity is a number of bytes above 0.*got -5"),
        ({"compute_capacity": "10GB"}, r"compute_capacity is .*got '10GB'"),
        ({"host_capacity": 0}, r"host_capacity is .*got 0"),
        ({"host_capacity": 10**6, "disk_dir": "/tmp", "disk_capacity": -1}, r"disk_capacity is .*got -1"),
        ({"prefetch": "2"}, r"prefetch is a number of chunks, at least 0; got '2'"),
        ({"host_buffers": 0.5}, r"host_buffers is a number .*got 0.5"),
        ({"min_chunk_size_mb": "a"}, r"needs min_chunk_size_mb to be at least 0, got 'a'"),
        ({"min_chunk_size_mb": -1}, r"needs min_chunk_size_mb to be at least 0, got -1$"),
        ({"min_chunk_size_mb": float("inf")}, r"needs min_chunk_size_mb to be .*got inf"),
        ({"dtype": "bf16"}, r"Gemini trains in torch.float16.*got dtype='bf16'"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(plain(), **options)


def check_plugin(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    with pytest.raises(ValueError, match=r"host_capacity is a number of bytes above 0.*got -1"):
        GeminiPlugin(host_capacity=-1)
    for plugin in (GeminiPlugin(precision="fp32"), LowLevelZeroPlugin(precision="fp32")):
        inner = plain()
        with pytest.raises(
            ValueError, match=r"averages gradients itself, but .* is a DistributedDataParallel"
        ):
            Booster(plugin=plugin).boost(DistributedDataParallel(inner), HybridAdam(inner.parameters()))


def test_plugins_refuse_at_once() -> None:
    spawn(check_plugin, 1)


@pytest.mark.parametrize("config", [-3, None, "x", {}, {2: 3}, {2: {"size": 3}}, {2: {"chunk_size": 0}}])
def test_a_chunk_configuration_without_size(config: Any) -> None:
    with pytest.raises(ValueError, match=r"a chunk configuration is a chunk size of at least 1"):
        ChunkManager(config)


def test_a_boundary_that_is_no_number() -> None:
    with pytest.raises(ValueError, match=r"needs a number of MB above 0, got 'x'"):
        ConstPlacementPolicy.set_const_memory_boundary("x")  # type: ignore[arg-type]


def test_models_that_cannot_be_held() -> None:
    with pytest.raises(TypeError, match=r"Gemini holds a torch.nn.Module, got str: 'x'"):
        small("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'0' has max_norm=0.5, so its forward pass writes"):
        small(nn.Sequential(nn.Embedding(4, 4, max_norm=0.5)))


def test_one_wrapper_and_one_optimizer() -> None:
    inner = plain()
    model = small(inner)
    for again in (inner, model):
        with pytest.raises(ValueError, match=r"lies in chunks of another GeminiDDP already"):
            small(again)
    with pytest.raises(ValueError, match=r"LowLevelZeroOptimizer needs .* lies in chunks of a GeminiDDP"):
        LowLevelZeroOptimizer(HybridAdam(model.parameters()))
    with pytest.raises(TypeError, match=r"wraps a plain torch.optim.Optimizer, got str: 'adam'"):
        GeminiOptimizer("adam", model)  # type: ignore[arg-type]
    GeminiOptimizer(HybridAdam(inner.parameters()), model)
    with pytest.raises(RuntimeError, match=r"this GeminiDDP has an optimizer already"):
        GeminiOptimizer(HybridAdam(inner.parameters()), model)


def test_parameters_without_values() -> None:
    with pytest.raises(ValueError, match=r"no values yet \(it is on the meta device\)"):
        LowLevelZeroOptimizer(HybridAdam(nn.Linear(2, 2, device="meta").parameters()))


def test_unfreezing() -> None:
    inner = plain()
    inner[2].bias.requires_grad_(False)
    model = small(inner)
    optimizer = GeminiOptimizer(HybridAdam(inner.parameters(), lr=1e-2), model)
    step(model, optimizer)
    inner[2].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'2.bias' was frozen when its chunk was made"):
        step(model, optimizer)


def test_weights_that_rest_where_they_are_used_may_be_written() -> None:
    inner: Any = plain()
    model = small(inner, "cuda")
    optimizer = GeminiOptimizer(HybridAdam(inner.parameters(), lr=0.0), model)
    step(model, optimizer)
    nn.init.zeros_(inner[2].weight)
    step(model, optimizer)
    assert not model.state_dict()["2.weight"].any()


def test_sparse_gradients() -> None:
    inner = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    for policy in ("cpu", "cuda"):
        model = small(copy.deepcopy(inner), policy)
        with pytest.raises(
            TypeError, match=r"dense gradients, got one in layout torch.sparse_coo of '0.weight'"
        ):
            model.backward(model(torch.tensor([1, 2])).sum())


def test_gradients_of_gradients() -> None:
    model = small(plain())
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"the backward pass of 2 was asked for with create_graph=True"):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    resident = small(plain(), "cuda")
    loss: Tensor = resident(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    assert slope.requires_grad


def test_copies() -> None:
    model = small(plain())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"GeminiDDP lies in chunks .* use state_dict\(\), or get_static_torch_model"
        ):
            copied(model)


def test_digits_are_not_dropped_without_a_word() -> None:
    with pytest.raises(
        ValueError, match=r"'0.weight' is of torch.float64, and Gemini would train it in torch.float32"
    ):
        GeminiDDP(plain().double(), "cpu", dtype=torch.float32)
    assert GeminiDDP(plain().double(), "cpu", dtype=torch.bfloat16).dtype is torch.bfloat16
    inner = plain()
    inner.register_buffer("table", torch.full((3,), 1 / 3, dtype=torch.float64))
    assert GeminiDDP(inner, "cpu", dtype=torch.float32).state_dict()["table"].dtype is torch.float64


def test_zero_keeps_float64() -> None:
    model = plain().double()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    serial = plain().double()
    x = torch.randn(2, 8, dtype=torch.float64)
    optimizer.backward(model(x).sum())
    optimizer.step()
    serial(x).sum().backward()
    torch.optim.SGD(serial.parameters(), lr=0.1).step()
    for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        assert mine.dtype is torch.float64
        torch.testing.assert_close(mine.data, theirs.data, rtol=1e-14, atol=1e-14)


def check_zeros(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for early in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        plugin = GeminiPlugin(
            device="cpu",
            placement_policy="cpu",
            precision="fp32",
            update_in_backward=early,
            min_chunk_size_mb=0.0001,
        )
        booster = Booster(plugin=plugin)
        boosted: Any = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(3):
            if step == 2:
                model[0].requires_grad_(False)
            booster.backward(boosted.model(torch.ones(2, 4)).square().mean(), boosted.optimizer)
            if step < 2:
                boosted.optimizer.step()
                boosted.optimizer.zero_grad(set_to_none=False)
        with pytest.raises(
            RuntimeError, match=r"has left zeros as the gradient of 0\.(bias|weight), which no rank"
        ):
            boosted.optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_zeros_that_would_move_a_frozen_weight(world_size: int) -> None:
    spawn(check_zeros, world_size)
