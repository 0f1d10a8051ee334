"""Pipeline stages of whole models and of configs, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.builder import build_pipeline_model, build_pipeline_model_from_cfg
from colossalai.builder.pipeline import partition_uniform
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import SHARED_GROUP
from colossalai.pipeline.utils import partition_uniform as documented
from colossalai.registry import MODELS
from colossalai.testing import assert_close, spawn

WIDTH = 128  # large enough not to be built at once


class Head(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def language_model(layers: int = 4) -> nn.Sequential:
    table = nn.Embedding(WIDTH, WIDTH)
    return nn.Sequential(table, *[nn.Linear(WIDTH, WIDTH) for _ in range(layers)], Head(table))


def check_vee(rank: int, world_size: int, port: int) -> list[list[str]]:
    """The same calls under another schedule give other chunks."""
    config = {"parallel": {"pipeline": {"size": 2, "schedule": "zbv"}}}
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    stages = [
        build_pipeline_model(language_model(), num_chunks=2),
        build_pipeline_model_from_cfg({"type": language_model}, num_chunks=2, partition_method="layer"),
    ]
    assert not any(hasattr(p, SHARED_GROUP) for stage in stages for p in stage.parameters())
    if rank == 0:  # both ends, so that their weight is one
        assert all(first[0].weight is last[-1].weight for first, last in map(_layers, stages))
    assert gpc.is_pipeline_last_stage() is (rank == 0)
    return [[name for name, _ in stage.named_parameters() if "weight" in name] for stage in stages]


def _layers(stage: nn.Module) -> list[list[Any]]:
    assert isinstance(stage, nn.ModuleList)
    return [[m for m in chunk.modules() if not list(m.children())] for chunk in stage]


def test_on_two_ranks_as_a_vee() -> None:
    first, last = spawn(check_vee, 2)
    assert first == [["0.0.weight", "1.4.weight"]] * 2
    assert last == [["0.1.weight", "0.2.weight", "1.3.weight"]] * 2


def check(rank: int, world_size: int, port: int) -> list[list[str]]:
    torch.manual_seed(0)
    whole = language_model()
    if not MODELS.has("language_model"):
        MODELS.register_module(language_model)
    colossalai.launch_from_torch(config={"parallel": {"pipeline": 2}}, backend="gloo", verbose=False)
    stages: list[nn.Module] = []
    for build in (
        lambda: build_pipeline_model(language_model(), verbose=True),
        lambda: build_pipeline_model(language_model(), num_chunks=2),
        lambda: build_pipeline_model_from_cfg({"type": "language_model"}, partition_method="layer"),
        lambda: build_pipeline_model_from_cfg(
            {"type": language_model, "layers": 4}, num_chunks=2, verbose=True
        ),
    ):
        torch.manual_seed(0)
        stages.append(build())
    expected = whole.state_dict()
    for stage in stages:
        for chunk in stage if isinstance(stage, nn.ModuleList) else [stage]:
            for name, value in chunk.state_dict().items():
                assert torch.equal(value, expected[name])
        shared = [name for name, p in stage.named_parameters() if hasattr(p, SHARED_GROUP)]
        assert [name[-8:] for name in shared] == (["0.weight"] if rank == 0 else ["5.weight"])
    return [[name for name, _ in stage.named_parameters() if "weight" in name] for stage in stages]


def test_on_two_ranks() -> None:
    first, last = spawn(check, 2)
    assert first[0] == first[2] == ["0.weight", "1.weight", "2.weight"]
    assert last[0] == last[2] == ["3.weight", "4.weight", "5.weight"]
    assert first[1] == ["0.0.weight", "1.3.weight"]
    assert last[1] == ["0.1.weight", "0.2.weight", "1.4.weight", "1.5.weight"]
    assert sorted(first[3] + last[3]) == sorted(first[1] + last[1])


def test_without_a_pipeline_the_stage_is_the_model() -> None:
    model: Any = language_model()
    stage = build_pipeline_model(model)
    assert list(stage.children()) == list(model.children())
    assert partition_uniform is documented


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"cuts an nn\.Sequential, got Linear"):
        build_pipeline_model(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="partition_method must be one of layer, uniform, parameter, balanced, got 'time'"
    ):
        build_pipeline_model_from_cfg({"type": language_model}, partition_method="time")
    with pytest.raises(
        ValueError, match="the model has 1 layers, but 1 pipeline stages with 2 chunks each need"
    ):
        build_pipeline_model(nn.Sequential(nn.Linear(2, 2)), num_chunks=2)


def _twice() -> nn.Sequential:
    """A layer that is used at two places, between two that share another weight."""
    torch.manual_seed(0)
    table = nn.Embedding(8, 8)
    model = nn.Sequential(table, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Head(table))
    model[3] = model[1]
    return model


def _train_twice(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    ids = torch.randint(8, (4,), generator=torch.Generator().manual_seed(1))
    serial, stage = _twice(), build_pipeline_model(_twice())
    booster, criterion = Booster("cpu"), nn.CrossEntropyLoss()
    model, optimizer, *_ = booster.boost(stage, torch.optim.SGD(stage.parameters(), 0.1))
    plain = torch.optim.SGD(serial.parameters(), 0.1)
    for _ in range(3):
        expected = criterion(serial(ids), ids)
        expected.backward()
        plain.step()
        plain.zero_grad()
        loss = booster.execute_pipeline(iter([(ids, ids)]), model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            assert_close(loss, expected)
    whole = serial.state_dict()
    assert len(stage.state_dict()) >= 3
    for name, value in stage.state_dict().items():
        assert_close(value, whole[name])


def test_a_layer_at_two_places_and_a_tied_weight() -> None:
    """The layer runs at both places; stages meet the shared weights in different orders, and add what belongs
    together.
    """
    spawn(_train_twice, 2)


class Counting(nn.Linear):
    """A layer with a buffer that changes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))


def check_shared_buffers(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={"parallel": {"pipeline": 2}}, backend="gloo", verbose=False)
    shared = Counting()
    build_pipeline_model(nn.Sequential(shared, shared, nn.Linear(4, 4), nn.Linear(4, 4)))  # in one stage
    with pytest.raises(ValueError, match=r"layers 0 and 3 .* one module, used by two stages, .* 'calls'"):
        build_pipeline_model(nn.Sequential(shared, nn.Linear(4, 4), nn.Linear(4, 4), shared))
    del shared.calls
    shared.register_buffer("calls", torch.zeros(()), persistent=False)
    build_pipeline_model(nn.Sequential(shared, nn.Linear(4, 4), nn.Linear(4, 4), shared))


def test_buffers_that_stages_would_share_are_refused() -> None:
    spawn(check_shared_buffers, 2)
