"""The loads of routers of transformers' models: under every plan those of the serial model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.engine import Engine
from colossalai.nn.layer.moe import LayerLoads, LoadHistory
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")

from tests.nn.policies.expert_models import CONFIGS, batch, build, in_double, launched, train  # noqa: E402

TENSOR = {"size": 2, "mode": "1d"}
PLANS: list[Any] = [
    pytest.param(["mixtral", "gpt_oss"], {}, 2, marks=pytest.mark.slow),
    (["qwen2_moe", "deepseek_v3"], {"moe": 2, "tensor": TENSOR}, 4),
    (["mixtral"], {"moe": 2, "sequence": 2}, 4),  # of a length that does not divide
]


def loads(model: Any, samples: slice | None = None) -> dict[str, LayerLoads]:
    history = LoadHistory(model)
    with in_double(model):
        train(model, samples, steps=1)
    history.step()
    model.eval()
    with torch.no_grad():
        model(**batch(0))  # is not counted
    history.step()
    return history.layers


def _compare(parallel: dict[str, Any], expected: dict[str, dict[str, LayerLoads]], **place: Any) -> None:
    samples = launched(parallel)
    for name, want in expected.items():
        model = build(name)
        with in_double(model):
            colossalai.nn.parallelize(model)
        found = loads(model, samples)
        assert {path: layer.tokens for path, layer in found.items()} == {
            path: layer.tokens for path, layer in want.items()
        }
        for path, layer in want.items():
            assert found[path].entropy == pytest.approx(layer.entropy, rel=1e-5)


@pytest.mark.parametrize(("names", "parallel", "ranks"), PLANS)
def test_equal_to_serial(names: list[str], parallel: dict[str, Any], ranks: int) -> None:
    spawn(partial(_compare, parallel, {name: loads(build(name)) for name in names}), ranks)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str) -> None:
    model = build(name)
    found = loads(model)
    layers = [layer for layer in found.values() if 0 < layer.entropy[0] < 3]
    assert len(layers) == len(found) == (1 if "deepseek" in name else 2)
    tokens, k = batch(0)["input_ids"].numel(), model.config.num_experts_per_tok
    assert {sum(layer.tokens[0]) for layer in layers} == {tokens * k}


def test_a_trainer_shows_them(tmp_path: Path) -> None:
    model = build("mixtral")
    given = batch(0)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    hook = hooks.ExpertLoadHook(tmp_path / "loads.png")
    trainer = Trainer(engine)
    hook.after_hook_is_attached(trainer)
    model(**given)
    hook.after_train_iter(trainer, None, None, None)
    shown = trainer.states["metrics"]["train"]["model.layers.1.mlp load"]
    assert 1 <= shown.get_accumulated_value() <= 4
    hook.after_train(trainer)
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
