"""The memory that a dry run predicts is the memory that a step needs, counted on CPU ranks tensor by
tensor.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.context.config import ConfigException
from colossalai.context.fake_launch import fake_launch
from colossalai.dry_run import MemoryEstimate, dry_run, estimate_memory, format_reports
from colossalai.testing import parametrize_sample, spawn
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.dry_run.plans import PLANS, build

PAGE = Path(__file__).parents[2] / "docs/source/en" / "gpt.md"


def measure(rank: int, world_size: int, port: int, config: dict[str, Any], checkpoint: bool) -> int:
    """The most bytes of tensors that were alive in the second step of this rank."""
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    torch.set_num_threads(1)
    model, optimizer, criterion, batch = build(checkpoint)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine.step()

    step()
    engine.zero_grad()
    weights = [p for group in engine.optimizer.param_groups for p in group["params"]]
    with LiveBytes() as live:
        live.hold((*engine.model.parameters(), *engine.model.buffers(), *weights))
        live.hold(t for t in tree_leaves(dict(engine.optimizer.state)) if torch.is_tensor(t))
        step()
    return live.peak


@parametrize_sample("name", list(PLANS), n=4)
def test_prediction_is_what_a_step_needs(name: str) -> None:
    nprocs, config, checkpoint = PLANS[name]
    measured = spawn(measure, nprocs, config=config, checkpoint=checkpoint)
    reports = dry_run(config, nprocs, functools.partial(build, checkpoint))
    assert [report.rank for report in reports] == list(range(nprocs))
    for report, real in zip(reports, measured, strict=True):
        predicted = report.memory.peak
        assert predicted == pytest.approx(real, rel=0.04), (report, real / 2**20, predicted / 2**20)


def test_parts_add_up_and_have_their_sizes() -> None:
    (report,) = dry_run(PLANS["fp16"][1], 1, functools.partial(build, False))
    memory, count = report.memory, report.parameters
    assert sum(memory.parts.values()) == memory.peak
    assert (memory.weights, memory.masters, memory.states) == (2 * count, 4 * count, 8 * count)
    assert memory.host == memory.buckets == 0


def test_autocast_keeps_weights_in_fp32() -> None:
    plain, half = (
        dry_run(config, 1, functools.partial(build, False))[0]
        for config in ({}, {"fp16": {"mode": AMP_TYPE.TORCH}})
    )
    assert half.memory.weights == plain.memory.weights == 4 * half.parameters
    assert half.memory.masters == 0
    assert half.memory.activations < plain.memory.activations


def test_data_parallel_ranks_have_buckets() -> None:
    reports = dry_run({}, 3, functools.partial(build, False))
    assert [report.rank for report in reports] == [0], "replicas are alike"
    assert reports[0].memory.buckets == reports[0].memory.weights
    views = {"torch_ddp": {"gradient_as_bucket_view": True}}
    assert dry_run(views, 3, functools.partial(build, False))[0].memory.buckets == 0


def test_further_stored_micro_batches_add_the_same_each() -> None:
    config = {"parallel": {"pipeline": 4}, "NUM_MICRO_BATCHES": 8}
    stages = dry_run(config, 4, functools.partial(build, False))
    first, second, third, _ = (report.memory for report in stages)
    assert third.moment == second.moment == "backward"
    assert second.activations > third.activations
    assert first.activations > second.activations


def test_zero3_divides_what_rests_and_leaves_activations() -> None:
    def zero(policy: str, ranks: int) -> MemoryEstimate:
        section = {"model_config": {"tensor_placement_policy": policy}, "update_in_backward": False}
        (report,) = dry_run({"zero": section}, ranks, functools.partial(build, True))
        return report.memory

    count = sum(p.numel() for p in build(True).model.parameters())
    host, more, device = zero("cpu", 4), zero("cpu", 8), zero("cuda", 4)
    assert host.host == pytest.approx(16 * count / 4, rel=1e-3)
    assert more.host == pytest.approx(host.host / 2, rel=1e-3)
    assert more.peak == host.peak, "the device holds what is computed now"
    assert device.peak - host.peak == pytest.approx(host.host, rel=1e-3)
    assert device.host == 0
    with pytest.raises(ConfigException, match=r"tensor_placement_policy 'cpu' and 'cuda', got 'moon'"):
        zero("moon", 4)


def test_the_levels_of_zero() -> None:
    def zero(**section: object) -> MemoryEstimate:
        (report,) = dry_run({"zero": section}, 4, functools.partial(build, True))
        return report.memory

    count = sum(p.numel() for p in build(True).model.parameters())
    first, second, offloaded = zero(level=1), zero(level=2), zero(level=2, cpu_offload=True)
    assert first.weights == second.weights == offloaded.weights == 2 * count
    assert first.gradients == 2 * count > second.gradients
    assert first.masters + first.states == pytest.approx(12 * count / 4, rel=1e-3)
    assert offloaded.masters + offloaded.states == first.host == 0
    assert offloaded.host == pytest.approx(14 * count / 4, rel=1e-3)
    disk = zero(level=3, offload_optimizer_config={"device": "nvme", "nvme_path": "/tmp"})
    assert disk.peak == zero(model_config={"tensor_placement_policy": "cpu"}).peak < offloaded.peak


def test_updates_on_trial_hold_a_part_twice() -> None:
    def host(clip: float = 0.0, **section: object) -> int:
        config = {"zero": {"level": 3, "cpu_offload": True, **section}, "clip_grad_norm": clip}
        (report,) = dry_run(config, 4, functools.partial(build, True))
        return report.memory.host

    count = sum(p.numel() for p in build(True).model.parameters())
    waiting = host(clip=1.0, update_in_backward=False)
    assert waiting == host(update_in_backward=True, precision="bf16")
    early = functools.partial(host, update_in_backward=True)
    assert early() == early(1.0) == early(max_norm=1.0, precision="bf16") == early(1.0, precision="bf16")
    assert host() == early(), "by default updates can be rolled back"
    assert early() - waiting == pytest.approx(14 * count / 4 / 4, rel=1e-3)
    assert early(undo_ratio=0.5) - waiting == pytest.approx(14 * count / 4 / 2, rel=1e-3)


def test_zero3_rests_on_the_host_unless_it_is_told_otherwise() -> None:
    (report,) = dry_run({"zero": {"level": 3}}, 4, functools.partial(build, True))
    (other,) = dry_run({"zero": {"level": 3, "placement_policy": "cpu"}}, 4, functools.partial(build, True))
    assert report.memory == other.memory
    assert report.memory.host > 0


def test_stages_of_a_pipeline_are_divided_by_zero() -> None:
    pipeline = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4}
    parts = functools.partial(build, True, tied=False)
    plain = dry_run({**pipeline, "fp16": {"mode": AMP_TYPE.NAIVE}}, 2, parts)
    divided = dry_run({**pipeline, "zero": {"level": 3, "update_in_backward": False}}, 4, parts)
    whole = dry_run({**pipeline, "zero": {"level": 1}}, 4, parts)
    for one, other, first in zip(plain, divided, whole, strict=True):
        assert other.parameters == first.parameters == one.parameters
        assert other.memory.activations == first.memory.activations > 0
        assert other.memory.activations >= one.memory.activations  # none, where the step needs most
        assert other.memory.host == pytest.approx(16 * other.parameters / 2, rel=1e-3)
        assert other.memory.masters == other.memory.states == 0
        assert first.memory.weights == 2 * first.parameters == one.memory.weights
        assert first.memory.masters == pytest.approx(one.memory.masters / 2, rel=1e-3)
    tied = dry_run({**pipeline, "zero": {"level": 3}}, 4, functools.partial(build, True))
    # the embedding of the first stage, whose gradient waits for that of the last one
    assert tied[0].memory.gradients > divided[0].memory.gradients
    assert tied[0].memory.weights == divided[0].memory.weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero": {"level": 3}, "clip_grad_norm": "abc"}, "'clip_grad_norm' must be a number"),
        ({"zero": {"level": 7}}, "needs level=1, level=2 or level=3"),
        ({"zero": {"level": 3}, "fp16": {"mode": AMP_TYPE.NAIVE}}, "both 'fp16' and 'zero'"),
        ({"zero": {"level": 3, "undo_ratio": 7}}, "undo_ratio is a share from 0 to 1, got 7"),
    ],
)
def test_zero_sections_that_a_job_would_refuse(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigException, ValueError), match=message):
        dry_run(config, 4, functools.partial(build, True))


@pytest.mark.parametrize("config", ["zero2", {"plugin": "zero2"}, None, LowLevelZeroPlugin])
def test_a_plugin_is_not_a_config(config: Any) -> None:
    """It was priced as plain data parallelism."""
    with pytest.raises(ConfigException, match=r"not a plugin or its name, got .*zero=dict\(level=2\)"):
        dry_run(config, 4, functools.partial(build, True))


def test_a_model_with_memory_is_refused() -> None:
    with fake_launch({}, 0, 1):
        parts = build(False)
        with pytest.raises(ValueError, match=r"on the meta device, but the parameter embed\..* has memory"):
            estimate_memory(*parts)


def test_what_a_job_would_raise() -> None:
    parts = functools.partial(build, False)
    with pytest.raises(ConfigException, match=r"the world size 3 is not a multiple of pipeline 2"):
        dry_run({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}, 3, parts)
    with pytest.raises(ConfigException, match=r"a pipeline of 2 stages, but no NUM_MICRO_BATCHES"):
        dry_run({"parallel": {"pipeline": 2}}, 2, parts)
    with pytest.raises(ConfigException, match=r"plays fp16 with AMP_TYPE.NAIVE or AMP_TYPE.TORCH"):
        dry_run({"fp16": {"mode": AMP_TYPE.APEX}}, 1, parts)
    assert not torch.distributed.is_initialized()
    (report,) = dry_run({}, 1, parts)
    assert report.memory.peak > 0


def test_table() -> None:
    config = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "NUM_MICRO_BATCHES": 2}
    head, first, last = format_reports(dry_run(config, 4, functools.partial(build, False))).splitlines()
    assert head.split()[:3] == ["ranks", "parameters", "weights"]
    assert (first.split()[0], last.split()[0]) == ("0-1", "2-3")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), {"__name__": "page"})
    assert "peak MiB" in capsys.readouterr().out
