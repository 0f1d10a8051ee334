"""Objects from configs."""

from __future__ import annotations

import pytest
import torch

from colossalai.builder import build_from_config, build_from_registry, build_gradient_handler
from colossalai.engine.gradient_handler import DataParallelGradientHandler
from colossalai.registry import LAYERS, LOSSES, SCHEDULE
from tests.engine.plans import mlp, sgd


def test_from_a_registry_and_from_a_class() -> None:
    config = {"type": "Linear", "in_features": 2, "out_features": 3}
    layer = build_from_registry(config, LAYERS)
    assert layer.weight.shape == (3, 2)
    assert config["type"] == "Linear", "the config is not used up"
    assert isinstance(build_from_registry({"type": torch.nn.Tanh}, LAYERS), torch.nn.Tanh)
    assert build_from_config(torch.nn.Linear, {"in_features": 2, "out_features": 3}).in_features == 2
    assert callable(build_from_registry({"type": "CrossEntropyLoss"}, LOSSES))


def test_handlers_are_found() -> None:
    model = mlp()
    config = {"type": "DataParallelGradientHandler"}
    assert isinstance(
        build_gradient_handler(config, model, sgd(model.parameters())), DataParallelGradientHandler
    )
    assert SCHEDULE.has("NonPipelineSchedule")


def test_refusals() -> None:
    for config in ({"lr": 1}, "Linear"):
        with pytest.raises(ValueError, match="needs a dict with a 'type', the name of a class in Registry"):
            build_from_registry(config, LAYERS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="registry 'layers' has no 'Linera'; did you mean 'Linear'"):
        build_from_registry({"type": "Linera"}, LAYERS)
    with pytest.raises(TypeError, match="needs a class or a function, got 'Linear'"):
        build_from_config("Linear", {})  # type: ignore[arg-type]
