"""What is measured beside model data, and the margins that follow from it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from colossalai.mesh import own_grad
from colossalai.zero.gemini import ChunkManager, ChunkMemStatsCollector, MemStats, OutOfCapacity
from colossalai.zero.gemini.memory_tracer import (
    OrderedParamGenerator,
    RuntimeMemTracer,
    StaticMemStatsCollector,
)
from colossalai.zero.gemini.placement import AutoPlacementPolicy
from colossalai.zero.gemini.tiers import UNLIMITED
from tests.zero.gemini.runs import Case, Training, batch, loss_of, net


def test_the_margin_is_what_chunks_and_states_leave() -> None:
    run = Training(Case(share=1.0))
    manager, compute = run.model.gemini_manager, run.model.chunk_manager.compute
    assert not manager.is_cuda_margin_mem_avail
    with pytest.raises(RuntimeError, match=r"cuda_margin_mem is known when the first training step is over"):
        _ = manager.cuda_margin_mem
    run.step(batch(0))
    assert manager.is_cuda_margin_mem_avail
    assert manager.cuda_margin_mem == compute.limit - compute.used
    before = manager.memstats().samples
    assert before > 0
    run.step(batch(1))
    manager.sample_overall_data()
    manager.record_model_data_volume()
    assert manager.memstats().samples == before  # the first step alone is measured


def test_tensors_beside_the_chunks_take_room() -> None:
    chunks = ChunkManager(64, device="cpu", compute_capacity=1000)
    chunks.add_extern_static_tensor(torch.zeros(200))
    assert chunks.total_mem["compute"] == 800
    with pytest.raises(OutOfCapacity, match=r"no room for a tensor of shape \(60,\) beside the chunks"):
        chunks.add_extern_static_tensor(torch.zeros(60))
    chunks.add_extern_static_tensor(torch.zeros(50))
    assert chunks.compute.free == 0


def test_a_collector_counts_between_start_and_finish() -> None:
    chunks, stats = ChunkManager(64, device="cpu", compute_capacity=1000), MemStats()
    collector = ChunkMemStatsCollector(chunks, stats)
    collector.sample_overall_data()
    assert stats.samples == 0
    collector.start_collection()
    collector.sample_overall_data()
    collector.finish_collection()
    collector.sample_overall_data()
    assert stats.samples == 2
    assert collector.margin() == 1000


@pytest.mark.parametrize("ratio", [0.2, 0.8])
def test_auto_leaves_a_share_to_activations_in_the_first_step(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    monkeypatch.setattr(AutoPlacementPolicy, "_warmup_non_model_data_ratio", 0.5)
    AutoPlacementPolicy.set_warmup_non_model_data_ratio(ratio)
    run = Training(Case("auto", share=4.0))
    manager, compute = run.model.gemini_manager, run.model.chunk_manager.compute
    weights = [c.nbytes for c in run.model.chunk_manager.chunks]
    loss = loss_of(run.model, batch(0))
    assert manager.is_warmup()
    limit = int(compute.limit * (1 - ratio))
    assert manager.limit() == limit
    # with 0.8 the weights do not fit into what is left, and some are evicted in the forward pass
    assert (limit < sum(weights)) == (ratio == 0.8)
    dropped = [event for event in manager.timeline.events if event.kind == "drop"]
    assert bool(dropped) == (ratio == 0.8)
    run.optimizer.backward(loss)
    assert not manager.is_warmup()
    assert manager.limit() == UNLIMITED


def test_auto_need_not_limit_what_an_earlier_run_measured() -> None:
    first = Training(Case("auto", share=4.0))
    first.step(batch(0))
    stats = first.model.gemini_manager.memstats()
    second = Training(Case("auto", share=4.0, options=(("memstats", stats),)))
    loss_of(second.model, batch(0))
    assert second.model.gemini_manager.limit() == UNLIMITED


def test_a_step_before_training() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    tracer = RuntimeMemTracer(model, torch.float32)
    for ask in (tracer.memstats, tracer.parameters_in_runtime_order):
        with pytest.raises(RuntimeError, match=r"is known after a forward and a backward pass"):
            ask()
    tracer.backward(loss_of(tracer, batch(0)))
    assert tracer.memstats().samples > 0
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for p in tracer.parameters_in_runtime_order()]
    assert order[0] == "embed.weight"
    blocks = [int(name.split(".")[1]) for name in order if name.endswith("norm.weight")]
    assert blocks == [*range(24), *reversed(range(24))]  # once forward, once backward
    assert not any(name.startswith("unused") for name in order)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(own_grad(p) is None for p in model.parameters())


def test_known_statistics_stay_as_they_are() -> None:
    model = net()
    tracer = RuntimeMemTracer(model, torch.float32)
    tracer.backward(loss_of(tracer, batch(0)))
    stats = tracer.memstats()
    known = stats.samples
    collector = StaticMemStatsCollector(tracer.traced.chunk_manager, stats)
    collector.start_collection()
    collector.sample_overall_data()
    collector.finish_collection()
    assert collector.memstats is stats
    assert stats.samples == known
    order = OrderedParamGenerator()
    assert order.is_empty()
    for param in tracer.parameters_in_runtime_order():
        order.append(param)
    assert len(set(order.generate())) == len(list(order.generate())) < len(order.param_visited_order)
    order.clear()
    assert order.is_empty()


@pytest.mark.gpu
def test_activations_are_measured_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    needs = []
    few, many = 1 << 10, 1 << 16
    for rows in (few, many):
        tracer = RuntimeMemTracer(model, torch.bfloat16)
        tracer.backward(tracer(torch.ones(rows, 64, device="cuda")).float().sum())
        needs.append(tracer.memstats().non_model)
    hidden = 2 * (many - few) * 64 * 2  # two hidden activations in bf16
    # what else lies on the GPU, the workspaces of cuBLAS say, is in both
    assert hidden <= needs[1] - needs[0] <= 4 * hidden
    manager = tracer.traced.gemini_manager
    device = torch.cuda.get_device_properties(manager.chunk_manager.device)
    assert 0 < manager.cuda_margin_mem <= device.total_memory - needs[1]
