"""Steps are run before a plan is accepted; the counters of a GPU are played by those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import CheckpointPlanner, CheckpointSolverChen, measure
from colossalai.auto_parallel.checkpoint.blocks import set_modes
from colossalai.auto_parallel.checkpoint.mode_solver import Choice, does_no_more
from colossalai.auto_parallel.checkpoint.planner import Tried
from colossalai.auto_parallel.checkpoint.search import Judged
from colossalai.auto_parallel.checkpoint.timeline import Like, TrainingStep
from colossalai.utils.held_tensors import map_held
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.auto_parallel.models import IDS, gpt2


class Counters(LiveBytes):
    """``torch.cuda``, as far as it is asked."""

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: Any = None) -> int:
        return self.now

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.now

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counters]:
    with Counters(block=512) as found:
        for name in (
            "synchronize",
            "empty_cache",
            "memory_allocated",
            "reset_peak_memory_stats",
            "max_memory_allocated",
        ):
            monkeypatch.setattr(measure.torch.cuda, name, getattr(found, name))
        yield found


def test_steps_are_run_before_a_plan_is_accepted(counters: Counters) -> None:
    """The peak that is told is the one that a step then has, other things in memory included."""
    torch.manual_seed(0)
    model = gpt2(10, 32)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    ids = IDS.repeat(16, 2)
    batch = {"input_ids": ids, "labels": ids}
    counters.hold((*model.parameters(), *model.buffers(), ids))
    other = torch.zeros(100_000)  # something else that lies there
    planner = CheckpointPlanner(model, batch, device="h200", reserved="64 KiB")
    planner._measures = True
    low, high = planner.least[2], planner.whole
    assert low < 0.8 * high
    for budget in (low, (low + high) // 2):
        plan = planner.plan(budget)
        planner.apply(plan)
        assert within(plan.peak, counters, model, batch) <= budget
    choice = Choice(["keep", "full"] * 5, 0.0, 0, regions=[(0, 5), (1, 3)])
    _, peak, seconds = planner._tried(planner.search.judge(choice))
    assert seconds > 0
    set_modes(model, *planner._by_block(choice))
    within(peak, counters, model, batch)
    del other


def test_noise_of_the_host_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step that computes more again happened to be measured as faster, the lighter one is taken."""
    ids = IDS.repeat(16, 2)
    planner = CheckpointPlanner(gpt2(8, 64), {"input_ids": ids, "labels": ids}, device="h200")
    budget = (planner.least[2] + planner.whole) // 2
    alone = set(planner.plan(budget).modes.values())
    assert {"full"} < alone

    def noisy(judged: Judged) -> Tried:
        is_lucky = set(judged.choice.modes) == {"full"}
        return Tried(judged, judged.peak + planner.unseen, 1.0 if is_lucky else 2.0)

    monkeypatch.setattr(planner, "_tried", noisy)
    planner._measures = True
    assert set(planner.plan(budget).modes.values()) == alone


def test_plans_of_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks keep less than their operations would; what steps with one mode show decides."""
    model = gpt2(8, 64)
    ids = IDS.repeat(16, 2)
    planner = CheckpointPlanner(model, {"input_ids": ids, "labels": ids}, device="h200", regions=False)
    played = {mode: line.peak for mode, line in planner.played.items()}
    kept = {"keep": 3 << 20, "selective": 2 << 20, "full": 1 << 18}
    ground = played["full"] - 8 * kept["full"] - (1 << 16)
    times = {"keep": 1.0, "selective": 1.2, "full": 1.3}

    def seen() -> tuple[int, float]:
        modes = [vars(block).get("recompute", "keep") for block in model.transformer.h]
        return ground + sum(kept[m] for m in modes), sum(times[m] for m in modes)

    def run(step: TrainingStep) -> measure.Whole | None:
        assert step.compiled
        peak, seconds = seen()
        return measure.Whole(seconds, peak, step.reserved)

    monkeypatch.setattr(measure, "measure_step", run)
    planner._measures = planner.step.compiled = True
    planner.played.pop("offload")  # as for steps that are compiled
    low, high = planner.least[2], planner.whole
    assert (low, high) == tuple(ground + 8 * kept[mode] for mode in ("full", "keep"))
    for keeping in range(9):
        budget = low + keeping * (kept["keep"] - kept["full"]) + 100
        plan = planner.plan(budget)
        planner.apply(plan)
        assert (plan.peak, plan.seconds) == (seen()[0], pytest.approx(seen()[1]))
        assert plan.peak <= budget
        assert plan.seconds <= 1.3 * (8 - keeping) + keeping + 0.31  # one block more, for the worst moments


def test_compiled_steps_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="compiled=True compiles steps and runs them"):
        CheckpointPlanner(gpt2(2, 32), {"input_ids": IDS, "labels": IDS}, device="h200", compiled=True)


def test_what_computes_no_more() -> None:
    def no_more(one: list[str], other: list[str], *regions: Any, seconds: float = 0.0) -> bool:
        return does_no_more(Choice(one, seconds, 0), Choice(other, 0.0, 0, regions=list(regions)))

    assert no_more(["keep", "full"], ["full", "full"])
    assert no_more(["keep", "selective"], ["keep", "full"])
    assert not no_more(["keep", "selective"], ["keep", "full"], seconds=1.0)
    assert not no_more(["keep", "full"], ["full", "keep"])
    assert no_more(["full", "full"], ["offload", "full"])
    assert not no_more(["offload", "full"], ["full", "full"])
    assert no_more(["full", "full"], ["keep", "keep"], (0, 2))
    assert not no_more(["full", "full"], ["keep", "keep"], (0, 1))
    assert not no_more(["offload", "full"], ["keep", "full"], (0, 2))
    two = Choice(["keep", "keep"], 0.0, 0, regions=[(0, 2)])
    assert not does_no_more(two, Choice(["full", "full"], 0.0, 0))  # the first block is computed to its end


def test_chains_of_noisy_times() -> None:
    """Where runs seemed to take longer with all blocks recomputed than both of their passes do, Chen's cuts
    are found all the same.
    """
    ids = IDS.repeat(16, 2)
    planner = CheckpointPlanner(gpt2(4, 32), {"input_ids": ids, "labels": ids}, device="h200")
    for stage in planner.problem.stages:
        keep = stage.costs["keep"]
        stage.costs["full"] = stage.costs["full"]._replace(seconds=3 * keep.seconds)
    assert min(planner.chain().btime) >= 0
    assert CheckpointSolverChen(planner.chain()).segments()[-1][1] == 4


@dataclass
class Given:
    """What a block may take: pytree does not know it."""

    x: Tensor
    masks: list[Tensor]


def test_arguments_of_a_block_that_runs_alone() -> None:
    """They look like those of its call, also in objects, and a block may write to them."""
    x = torch.zeros(2, 3, requires_grad=True)
    likes = map_held(Like.of, ((Given(x, [torch.ones(4) > 0]),), {"scale": x}))
    (given,), kwargs = measure._made(likes, torch.device("cpu"))
    assert isinstance(given, Given)
    assert [tuple(t.shape) for t in (given.x, *given.masks, kwargs["scale"])] == [(2, 3), (4,), (2, 3)]
    assert given.masks[0].dtype == torch.bool
    given.x.add_(1).sum().backward()  # type: ignore[no-untyped-call]
    assert given.x.requires_grad


def within(peak: int, counters: Counters, model: nn.Module, batch: dict[str, Tensor]) -> int:
    """A step needs what was told."""
    for _ in range(2):
        model.zero_grad()
        counters.reset_peak_memory_stats()
        model(**batch).loss.backward()
    model.zero_grad()
    assert 0.98 * peak <= counters.peak <= peak
    return peak
