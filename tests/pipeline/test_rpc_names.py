"""The engines with the names of RPC pipelines, and ``PipelineScheduleV2``, equal the serial model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import get_tensor_shape
from colossalai.engine.schedule._pipeline_schedule_v2 import PipelineScheduleV2
from colossalai.pipeline.pipeline_process_group import ppg
from colossalai.pipeline.rpc import (
    ChimeraPipelineEngine,
    FillDrainPipelineEngine,
    OneFOneBPipelineEngine,
    PipelineEngine,
)
from colossalai.testing import spawn
from tests.pipeline.plans import HIDDEN, build, problem

# the engine, chunks on each rank, whether activations are computed again
CASES: list[tuple[type[PipelineEngine], int, bool]] = [
    (FillDrainPipelineEngine, 1, False),
    (OneFOneBPipelineEngine, 1, True),
    (OneFOneBPipelineEngine, 2, False),
    (ChimeraPipelineEngine, 1, False),
]
STAGES, MICROBATCHES = 2, 4


def launch(rank: int, world_size: int, port: int, **more: Any) -> None:
    config = {"parallel": {"pipeline": STAGES}, "NUM_MICRO_BATCHES": MICROBATCHES, **more}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def partition(pp_rank: int, chunk: int, stage_num: int) -> nn.Module:
    layers = list(build().named_children())
    bounds = [len(layers) * i // stage_num for i in range(stage_num + 1)]
    return nn.Sequential(OrderedDict(layers[bounds[pp_rank] : bounds[pp_rank + 1]]))


def serial() -> tuple[list[float], dict[str, Tensor], Tensor]:
    """The losses, the trained weights, and the outputs for the first batch before training."""
    model, task = build(), problem()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = model(task.batches[0][0]).detach()
    losses = []
    for batch in task.batches:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}, before


def accuracy(output: Tensor, label: Tensor) -> float:
    return float((output.argmax(-1) == label).float().mean())


def compare(kind: type[PipelineEngine], chunks: int, checkpoint: bool) -> None:
    losses, weights, before = serial()
    engine = kind(partition, STAGES, MICROBATCHES, "cpu", chunks, nn.CrossEntropyLoss(), accuracy, checkpoint)
    batches = problem().batches
    replicas, replica = gpc.data_parallel_size, gpc.get_global_rank() // STAGES
    mine = [tuple(part.chunk(replicas)[replica] for part in batch) for batch in batches]
    has_loss = engine.pipeline.has_loss
    seen = engine.forward_backward(mine[0][0], forward_only=True)
    assert (seen.output is not None) == has_loss
    assert seen.loss is None
    if has_loss:
        torch.testing.assert_close(seen.output, before.chunk(replicas)[replica])
    engine.initialize_optimizer(torch.optim.AdamW, lr=0.01)
    for (data, label), expected in zip(mine, losses, strict=True):
        result = engine.forward_backward(data, labels=label)
        assert (result.loss is not None) == (result.metric is not None) == has_loss
        if result.loss is not None:
            assert result.metric == accuracy(result.output, label)
            total = result.loss.clone()
            torch.distributed.all_reduce(total, group=gpc.mesh.group("dp"))
            assert float(total) / replicas == pytest.approx(expected, rel=1e-4)
    for name, p in engine.model.named_parameters():
        own = name.partition(".")[2] if chunks > 1 else name
        torch.testing.assert_close(p.detach(), weights[own], rtol=1e-3, atol=1e-5)


def check_engines(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for case in CASES:
        compare(*case)
    ppg.set_global_info(rank, world_size, dp_degree=2)
    assert (ppg.get_local_pp_rank(), ppg.get_local_stage_global_ranks()) == (rank % 2, [rank])
    with pytest.raises(ValueError, match="dp_degree=1, but the launch has 2; launch the job in this form"):
        ppg.set_global_info(rank, world_size)
    with pytest.raises(ValueError, match="stage_num=3, but the job was launched with 2 pipeline"):
        OneFOneBPipelineEngine(partition, 3, 4, "cpu")
    with pytest.raises(TypeError, match="partition_fn must return a module, got int"):
        OneFOneBPipelineEngine(lambda *place: 3, STAGES, 4, "cpu")  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="has no optimizer; call initialize_optimizer first"):
        OneFOneBPipelineEngine(partition, STAGES, 4, "cpu").step()
    with pytest.warns(UserWarning, match="runs the zero-bubble schedule zbh1"):
        ChimeraPipelineEngine(partition, STAGES, 4, "cpu")
    with (
        pytest.warns(UserWarning, match="zbh1"),
        pytest.raises(ValueError, match=r"got chunk=2; leave chunk=1, or use OneFOneBPipelineEngine"),
    ):
        ChimeraPipelineEngine(partition, STAGES, 4, "cpu", chunk=2)
    with pytest.raises(ValueError, match="OneFOneBPipelineEngine: chunk is at least 1, got 0"):
        OneFOneBPipelineEngine(partition, STAGES, 4, "cpu", chunk=0)


def test_engines_equal_the_serial_model() -> None:
    spawn(check_engines, 4)


def check_schedule(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port, TENSOR_SHAPE=(4, HIDDEN))
    assert get_tensor_shape() == (4, HIDDEN)
    losses, weights, _ = serial()
    model = partition(rank, 1, STAGES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    schedule = PipelineScheduleV2(MICROBATCHES)
    schedule.pre_processing(engine)
    for batch, expected in zip(problem().batches, losses, strict=True):
        engine.zero_grad()
        _, _, loss = schedule.forward_backward_step(engine, iter([batch]), forward_only=False)
        engine.step()
        assert loss is None or loss.item() == pytest.approx(expected, rel=1e-4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=1e-3, atol=1e-5)


def test_schedule_v2_equals_the_serial_model() -> None:
    spawn(check_schedule, 2)


def test_without_a_launch() -> None:
    with pytest.raises(RuntimeError, match="there are no RPC workers that the first rank could drive"):
        OneFOneBPipelineEngine(partition, STAGES, 4, "cpu")
    with pytest.raises(RuntimeError, match="set_global_info needs a launched job"):
        ppg.set_global_info(0, 2)
