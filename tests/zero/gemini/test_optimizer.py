"""``GeminiOptimizer`` and its jobs: options of the right moment, loss scale, other optimizers, refusals; and
tests that must fail.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
import colossalai.kernel.native.adam as native
from colossalai.nn.optimizer import FusedLAMB, HybridAdam, Lamb
from colossalai.testing import RankError, spawn
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from colossalai.zero.gemini import ChunkManager, GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from colossalai.zero.gemini.host_updates import HostUpdates
from colossalai.zero.gemini.update_worker import UpdateWorker
from tests.zero.gemini.runs import Case, Serial, Training, batch, compare, launch, loss_of, net
from tests.zero.gemini.test_model import small


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def two_groups(params: Iterable[Any]) -> torch.optim.Optimizer:
    params = list(params)
    groups = [{"params": params[::2], "lr": 3e-3}, {"params": params[1::2], "weight_decay": 0.0}]
    return HybridAdam(groups, lr=1e-2, weight_decay=0.1, eps=1e-4)


@pytest.mark.parametrize("optimizer", [adamw, two_groups])
@pytest.mark.parametrize("early", [False, True])
def test_other_optimizers(optimizer: Any, early: bool) -> None:
    compare(Case(early=early, share=0.25), optimizer=optimizer)
    if optimizer is adamw:  # fp32 masters of half-precision weights
        run = Training(Case(dtype=torch.bfloat16, early=early), optimizer=optimizer)
        before = float(run.step(batch(0)))
        for _ in range(8):
            after = float(run.step(batch(0)))
        assert after < 0.9 * before


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_changes_the_next_step_not_the_one_under_way(early: bool) -> None:
    run, serial = Training(Case(early=early), build=tower), Serial(Case(), build=tower)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.3) for o in (run.optimizer, serial.optimizer)]
    hold = threading.Event()
    update = run.optimizer._updates.run

    def slow(*args: Any) -> None:  # no job runs before the scheduler has
        hold.wait(timeout=20)
        update(*args)

    run.optimizer._updates.run = slow  # type: ignore[method-assign]
    for step in range(4):
        run.model.settle()
        hold.clear()
        got = run.step(batch(step))
        schedules[0].step()
        hold.set()
        expected = serial.step(batch(step))
        schedules[1].step()
        assert torch.allclose(got, expected, rtol=1e-5), step


def test_fp16_skips_steps_that_overflow() -> None:
    run = Training(Case(dtype=torch.float16))
    run.optimizer.scaler._scale = 2.0**40
    before = run.model.state_dict()
    run.step(batch(0))
    assert run.optimizer.step_was_skipped
    after = run.model.state_dict()
    assert all(torch.equal(before[n], t) for n, t in after.items() if t.is_floating_point())
    run.optimizer.scaler._scale = 2.0**8
    first = float(run.step(batch(0)))
    assert not run.optimizer.step_was_skipped
    for _ in range(25):
        last = float(run.step(batch(0)))
    assert last < 0.9 * first


@pytest.mark.parametrize("share", [2.0, 4.0])
def test_auto_after_first_steps_that_overflow(share: float) -> None:
    """No states have been made yet: chunks that move to the compute tier need room for them nevertheless."""
    losses = []
    for case in (Case("auto", torch.float16, share=share), Case("cpu", torch.float16)):
        run = Training(case)
        losses.append([])
        for step in range(6):
            run.optimizer.scaler._scale = 2.0 ** (40 if step < 2 else 8)
            losses[-1].append(run.step(batch(step)))
            assert run.optimizer.step_was_skipped == (step < 2)
        homes = {c.home.name for c in run.model.chunk_manager.chunks if c.home}
        assert ("compute" in homes) == (case.policy == "auto")
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_auto_makes_states_where_chunks_will_rest() -> None:
    """The host has room for weights and gradients alone, and they leave it before the first update."""
    weights = sum(c.shard_nbytes for c in Training(Case("auto")).model.chunk_manager.chunks)
    run = Training(Case("auto", share=20.0, options=(("host_capacity", 2 * weights),)))
    other = Training(Case("cpu"))
    for step in range(3):
        assert torch.equal(run.step(batch(step)), other.step(batch(step))), step
        tiers = run.model.chunk_manager
        assert all(chunk.home is tiers.compute for chunk in tiers.chunks)
    by_hand = Training(Case("auto", share=20.0))
    by_hand.optimizer.backward(loss_of(by_hand.model, batch(0)))
    by_hand.optimizer.clip_grad_by_norm(1e9)  # gradients lie where the script has seen them until the step
    by_hand.optimizer.step()
    assert all(
        chunk.home is by_hand.model.chunk_manager.compute for chunk in by_hand.model.chunk_manager.chunks
    )


def _promoted(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    plain = Training(Case("cpu"))
    plain.step(batch(0))
    plain.model.settle()
    promotion, manager = plain.optimizer._promotion, plain.model.gemini_manager
    promotion._expected = promotion.state_bytes.expected()
    chunks = sorted(manager.chunk_manager.chunks, key=lambda c: manager.trace.first_use(c.index))
    half = chunks[: len(chunks) // 2]
    needed = sum(map(promotion._cost, half)) + promotion._window()  # and what is gathered
    run = Training(Case("auto", options=(("compute_capacity", needed),)))
    run.step(batch(0))
    promoted = {c.index for c in run.model.chunk_manager.chunks if c.home is run.model.chunk_manager.compute}
    assert promoted == {c.index for c in half}
    run.step(batch(1))


def test_ranks_that_share_chunks_leave_room_for_gathered_ones_once() -> None:
    spawn(_promoted, 2)


def test_auto_leaves_room_for_states_of_layers_that_are_used_later() -> None:
    run, other = (
        Training(Case(policy, share=share), build=sleeper) for policy, share in (("auto", 4.0), ("cpu", None))
    )
    for step in range(6):
        for one in (run, other):
            one.model.unwrap().is_awake = step >= 3
        assert torch.equal(run.step(batch(step)), other.step(batch(step))), step


def sleeper(reentrant: bool | None = None) -> nn.Module:
    """Half of its layers sleep at first."""

    class Sleeper(nn.Sequential):
        is_awake = False

        def forward(self, words: torch.Tensor) -> Any:
            for i, layer in enumerate(self):
                words = layer(words) if self.is_awake or i % 2 == 0 or i > 9 else words
            return words

    return Sleeper(*tower())


def test_a_second_step_after_one_that_overflowed_does_nothing() -> None:
    run = Training(Case(dtype=torch.float16))
    run.step(batch(0))
    before = run.model.state_dict()
    run.optimizer.scaler._scale = 2.0**40
    run.optimizer.backward(loss_of(run.model, batch(1)))
    run.optimizer.step()
    assert run.optimizer.step_was_skipped
    run.optimizer.step()  # there are no gradients any more
    after = run.model.state_dict()
    assert all(torch.equal(before[n], t) for n, t in after.items() if t.is_floating_point())


@pytest.mark.parametrize("is_native", [True, False])
def test_digits_of_parameters_that_only_some_steps_use(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Those beside their bf16 weights must not be lost when others of the same chunk are updated."""
    monkeypatch.setattr(native, "native_works", lambda: is_native)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.maybe, self.head = nn.Embedding(24, 8), nn.Linear(8, 8), nn.Linear(8, 24)
            self.is_used = True

        def forward(self, words: torch.Tensor) -> Any:
            x = self.embed(words)
            return self.head(self.maybe(x) if self.is_used else x)

    case = Case(dtype=torch.bfloat16)
    build: Any = lambda reentrant: Sometimes()  # noqa: E731
    run, serial = Training(case, build=build), Serial(case, build=build)
    for step in range(8):
        run.model.unwrap().is_used = serial.model.is_used = step % 3 != 2
        assert torch.equal(run.step(batch(step)), serial.step(batch(step))), step
    for number, state in serial.optimizer.state_dict()["state"].items():
        assert torch.equal(run.optimizer.state_dict()["state"][number]["master"], state["master"]), number


class Reader(nn.Module):
    """A layer, and another one's weights as they are."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), [other]

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.own(nn.functional.linear(x, self.other[0].weight.detach())))


class Stopped(nn.Module):
    """Weights are used again in the backward pass when their gradients have come and gone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.late = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.reader = Reader(self.late)
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 24)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.reader(torch.tanh(self.first(self.embed(words))))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.head(self.late(x))


def test_weights_that_the_backward_pass_needs_again_are_not_updated_yet() -> None:
    compare(Case(early=True), 5, build=lambda reentrant: Stopped())


def test_few_host_buffers_are_enough_when_updates_run_in_the_backward_pass() -> None:
    run = compare(Case(early=True, options=(("host_buffers", 3),)), build=tower, steps=5)
    assert run.model.gradients.memory.host.made <= 3 + 2  # chunks of other sizes have their own


def tower(reentrant: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(24, 8), *[nn.Linear(8, 8) for _ in range(10)], nn.Linear(8, 24))


def test_update_in_backward_refuses_what_it_cannot_do() -> None:
    run = Training(Case(early=True), build=tower)
    with pytest.raises(RuntimeError, match="clip_grad_by_norm comes too late"):  # before anything is updated
        run.optimizer.clip_grad_by_norm(1.0)
    run.step(batch(0))
    run.optimizer.backward(loss_of(run.model, batch(1)))
    with pytest.raises(RuntimeError, match="clip_grad_by_norm comes too late: with update_in_backward=True"):
        run.optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match=r"a second gradient came for chunk .* whose update had begun"):
        run.optimizer.backward(loss_of(run.model, batch(2)))


def test_refusals() -> None:
    model = net()
    with pytest.raises(TypeError, match="needs the model that GeminiDDP made, got Net; wrap the model first"):
        GeminiAdamOptimizer(model)
    with pytest.raises(ValueError, match="gpu_margin_mem_ratio is a share from 0 to 1, got 2"):
        GeminiAdamOptimizer(small(net()), gpu_margin_mem_ratio=2)
    with pytest.raises(
        ValueError, match=r"group 0 of HybridAdam holds a parameter of shape \(3,\) that is in no chunk"
    ):
        GeminiOptimizer(HybridAdam([nn.Parameter(torch.zeros(3))]), small(net()))
    with pytest.raises(
        ValueError,
        match=r"FusedLAMB clips by the norm of all gradients \(max_grad_norm=1.0\).* give it max_grad_norm=0",
    ):
        Training(Case(), optimizer=FusedLAMB)
    run = Training(Case())
    with pytest.raises(RuntimeError, match="takes no further group"):
        run.optimizer.add_param_group({"params": []})


def test_the_margin_is_given_to_chunks() -> None:
    case = Case(share=4.0)
    run, serial = Training(case), Serial(case)
    run.optimizer._promotion.margin = 0.5
    for step in range(4):
        assert torch.allclose(run.step(batch(step)), serial.step(batch(step)), rtol=1e-5)
    homes = [c.home.name for c in run.model.chunk_manager.chunks if c.home]
    assert {"compute", "host"} == set(homes)


def test_stage_3_of_the_wrappers() -> None:
    config = {"device": "cpu", "dtype": torch.float32, "min_chunk_size_mb": 0.001, "search_range_mb": 0.001}
    model = zero_model_wrapper(net(), 3, config)
    optimizer = zero_optim_wrapper(model, HybridAdam(model.parameters(), lr=1e-2), max_norm=1.0)
    loss = loss_of(model, batch(0))
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert loss_of(model, batch(0)) < loss


# Tests of the tests: what would go wrong without it is seen


def test_without_waiting_for_updates_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    update = HostUpdates.run

    def late(self: Any, *args: Any) -> None:
        gate.wait(timeout=0.5)
        update(self, *args)

    monkeypatch.setattr(HostUpdates, "run", late)
    monkeypatch.setattr(UpdateWorker, "wait", lambda self, key: None)
    monkeypatch.setattr(UpdateWorker, "is_done", lambda self, key: True)
    case = Case()
    run, serial = Training(case), Serial(case)
    run.step(batch(0))
    serial.step(batch(0))
    got, expected = loss_of(run.model, batch(1)), loss_of(serial.model, batch(1))
    gate.set()
    run.model.gemini_manager.worker.wait_all()
    assert not torch.allclose(got, expected, rtol=1e-4)


def _skip_one(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    reduce = ChunkManager.reduce_chunk

    def careless(self: Any, chunk: Any, grads: torch.Tensor) -> Any:
        if chunk.index == 3:
            return grads[chunk.own].clone(), reduce(self, chunk, grads)[1]
        return reduce(self, chunk, grads)

    ChunkManager.reduce_chunk = careless  # type: ignore[method-assign]
    compare(Case(), steps=2)


def test_without_one_average_numbers_are_wrong() -> None:
    with pytest.raises(RankError, match="AssertionError"):
        spawn(_skip_one, 2)


def _whole(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    with pytest.raises(
        ValueError, match="Lamb needs whole parameters, but Gemini cuts chunks evenly over 2 ranks"
    ):
        Training(Case(), optimizer=lambda p: Lamb(p))


def test_optimizers_of_whole_parameters_are_refused_on_several_ranks() -> None:
    spawn(_whole, 2)


def _cut(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    model = GeminiDDP(colossalai.nn.Linear(4, 6), "cpu")
    with pytest.raises(
        ValueError, match=r"Lamb needs whole parameters, but one of shape \(6, 4\) is cut over"
    ):
        GeminiOptimizer(Lamb(model.parameters()), model)


def test_optimizers_of_whole_parameters_are_refused_where_parameters_are_cut() -> None:
    """With one replica chunks are whole, and what is in them may still be pieces."""
    spawn(_cut, 2)
    compare(Case(), optimizer=lambda p: Lamb(p, lr=1e-3))


def test_of_jobs_that_wait_the_most_urgent_that_is_ready_is_next() -> None:
    worker, go = UpdateWorker(), threading.Event()
    begun: list[str] = []

    def first() -> None:
        go.wait(30)
        begun.append("first")

    worker.submit(0, 0, "first", first)
    worker.submit(1, 5, "urgent, later", lambda: begun.append("later"), lambda: False)
    worker.submit(2, 1, "most urgent, not ready", lambda: begun.append("not ready"), lambda: False)
    worker.submit(3, 9, "ready", lambda: begun.append("ready"))
    go.set()
    worker.wait_all()
    # those that are not ready are taken in the order in which their gradients were sent
    assert begun == ["first", "ready", "later", "not ready"]


def test_the_norm_after_clipping_by_value_is_that_of_the_clipped_gradients() -> None:
    run = Training(Case(clip=100.0))
    run.step(batch(0))  # from now on norms are taken before gradients leave for the host
    run.model.zero_grad()
    loss = loss_of(run.model, batch(0))
    run.optimizer.backward(loss)
    run.optimizer.clip_grad_by_value(1e-4)
    norm = run.optimizer.clip_grad_by_norm(1.0)
    count = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    assert 0 < float(norm) <= 1e-4 * count**0.5 * 1.0001


def _norms(case: Case, steps: int = 12) -> list[float]:
    run, norms = Training(case, partial(net, blocks=5)), []
    for step in range(steps):
        run.step(batch(step))
        assert run.optimizer.grad_norm is not None
        norms.append(float(run.optimizer.grad_norm))
    return norms


def test_the_norm_is_the_same_wherever_chunks_rest() -> None:
    expected = _norms(Case("cuda", clip=0.1))
    assert min(expected) > 0
    for case in (Case("cpu", clip=0.1), Case("auto", share=0.5, clip=0.1), Case("auto", nvme=0.5, clip=0.1)):
        assert _norms(case) == expected, str(case)
