"""Pipelines on GPUs: gloo with several ranks on one, NCCL with one each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.pipeline import split_model
from colossalai.pipeline.stage import Placement, launched_shape
from colossalai.testing import skip_if_not_enough_gpus, spawn
from colossalai.testing.pipelined import cut
from colossalai.utils import get_current_device
from tests.pipeline.plans import build, config, problem

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)]


def check_cuda(rank: int, world_size: int, port: int, schedule: str, chunks: int, backend: str) -> None:
    colossalai.launch_from_torch(
        config=config(schedule, world_size, 4, chunks), backend=backend, verbose=False
    )
    serial = build()
    assert isinstance(serial, nn.Sequential)
    place = Placement(world_size, chunks, launched_shape())
    stages = cut(serial, place, gpc.get_local_rank(ParallelMode.PIPELINE))
    model = stages[0] if chunks == 1 else nn.ModuleList(stages)
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), verbose=False
    )
    serial = build().to(get_current_device())
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    for x, y in problem().batches:
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([(x, y)]))
        engine.step()
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(serial(x.to(get_current_device())), y.to(get_current_device()))
        expected.backward()
        optimizer.step()
        if loss is not None:
            assert loss.is_cuda
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    theirs = dict(serial.named_parameters())
    for name, p in engine.model.named_parameters():
        short = name if chunks == 1 else name.partition(".")[2]
        torch.testing.assert_close(p, theirs[short], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_gloo_with_two_stages_on_one_gpu(schedule: str, chunks: int) -> None:
    spawn(check_cuda, 2, schedule=schedule, chunks=chunks, backend="gloo")


@pytest.mark.gpu
@skip_if_not_enough_gpus(2)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_nccl_with_a_gpu_for_each_stage(schedule: str, chunks: int) -> None:
    spawn(check_cuda, 2, schedule=schedule, chunks=chunks, backend="nccl")


def check_hugging_face(rank: int, world_size: int, port: int, schedule: str, chunks: int) -> None:
    """GPT-2, whose tied table is on the first and the last stage, or twice on the first rank."""
    from tests.nn.policies import zoo
    from tests.pipeline.hugging_face import batch

    colossalai.launch_from_torch(
        config=config(schedule, world_size, 4, chunks), backend="gloo", verbose=False
    )
    model = split_model(zoo.build("gpt2", n_layer=5))
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    serial = zoo.build("gpt2", n_layer=5).to(get_current_device())
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1)
    for step in range(3):
        given = {name: tensor.to(get_current_device()) for name, tensor in batch("gpt2", step).items()}
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([given]), return_output_label=False)
        engine.step()
        optimizer.zero_grad()
        expected = serial(**given).loss
        expected.backward()
        optimizer.step()
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    theirs = serial.state_dict()
    for stage in model if isinstance(model, nn.ModuleList) else [model]:
        for name, p in stage.state_dict().items():
            torch.testing.assert_close(p, theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_hugging_face_stages_on_one_gpu(schedule: str, chunks: int) -> None:
    pytest.importorskip("transformers", reason="needs `pip install transformers`")
    spawn(check_hugging_face, 2, schedule=schedule, chunks=chunks)
