"""Mixed precision by the config (38); the sections that list all defaults are in `tests.amp.page_38`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import colossalai.amp
from colossalai.amp import AMP_TYPE
from colossalai.amp.apex_amp import ApexAMPOptimizer
from colossalai.amp.naive_amp import NaiveAMPOptimizer
from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.core import global_context as gpc
from colossalai.engine.features import PRECISION_OF
from colossalai.testing import assert_equal_in_group, spawn
from tests.amp.page_38 import DOCUMENTED
from tests.documents.pages import code
from tests.documents.scripts import WITHOUT_INDEX, as_it_is, is_inside, prepare, run, values_of
from tests.engine.plans import initialize, launch


def check_minimum(rank: int, world_size: int, port: int) -> list[type]:
    launch(port)
    return [type(initialize({"fp16": fp16})[0].optimizer) for fp16 in values_of("fp16", code("38.fp16"))]


def test_the_minimum_for_each_mode() -> None:
    (optimizers,) = spawn(check_minimum, 1)
    assert optimizers == [TorchAMPOptimizer, NaiveAMPOptimizer, ApexAMPOptimizer]


def test_amp_without_initialize() -> None:
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "criterion": nn.MSELoss()}
    names = run(code("38.convert"), colossalai=colossalai, **names)
    dtypes = []
    model.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    output = names["model"](torch.full((3, 4), 0.01))
    names["optimizer"].backward(names["criterion"](output, torch.zeros(3, 2)))
    names["optimizer"].step()
    assert is_inside(names["optimizer"], TorchAMPOptimizer)
    assert dtypes == [torch.float16]
    assert not torch.equal(model.weight, before)


# A first scale of 2**32 is so far beyond fp16 that dozens of steps would be skipped before the first one is
# made.
OURS = {(AMP_TYPE.NAIVE, "initial_scale"): 2**16}


@pytest.mark.parametrize("mode", AMP_TYPE)
def test_the_listed_defaults_are_ours(mode: AMP_TYPE) -> None:
    arguments = inspect.signature(PRECISIONS[PRECISION_OF[mode]]).parameters
    for name, value in DOCUMENTED[mode].items():
        if name != "enabled":  # initialize reads it
            assert arguments[name].default == OURS.get((mode, name), value), name


CONFIG = code("38.config", ("BATCH_SIZE = 128", "BATCH_SIZE = 4"), ("NUM_EPOCHS = 300", "NUM_EPOCHS = 3"))


def check_train_with_engine(rank: int, world_size: int, port: int, folder: Path) -> None:
    prepare(folder, CONFIG, ["--config", "config.py"])
    names = run(
        code("38.imports"),
        code("38.launch"),
        code("38.components", ("warmup_steps=50", "warmup_steps=2")),
        code("38.initialize"),
        Gray2RGB=as_it_is,
    )
    dtypes, norms = set(), []
    names["model"].head.register_forward_hook(lambda *args: dtypes.add(args[-1].dtype))
    parameters = list(names["model"].parameters())
    names["optimizer"].register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in parameters]).norm().item())
    )
    names = run(code("38.train", WITHOUT_INDEX), **names)
    assert is_inside(names["engine"].optimizer, TorchAMPOptimizer)
    assert gpc.config.DROP_RATE == 0.1
    assert dtypes == {torch.float16}
    iterations = 3 * (16 // 4 // world_size)
    assert len(norms) >= iterations - 2, "hardly a step is skipped at the first scale"
    assert max(norms) <= 1.0 + 1e-3
    assert names["loss"].isfinite()
    assert names["lr_scheduler"].last_epoch >= len(norms)
    for p in parameters:
        assert p.dtype is torch.float32
        assert_equal_in_group(p.detach())


@pytest.mark.parametrize("world_size", [1, 2])
def test_train_with_engine(world_size: int, tmp_path: Path) -> None:
    spawn(check_train_with_engine, world_size, folder=tmp_path)
