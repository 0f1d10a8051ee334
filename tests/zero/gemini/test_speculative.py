"""Speculative updates in the backward pass, with clipping and loss scale: accepted, or rolled back to
the last bit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from colossalai.zero.gemini import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer, speculative
from colossalai.zero.gemini.chunk_gradients import ChunkGradients
from colossalai.zero.gemini.speculative import ChunkSnapshot, SpeculativeUpdates, same_options
from tests.zero.gemini.runs import SMALL, batch, hybrid, launch, loss_of
from tests.zero.gemini.test_model import small
from tests.zero.gemini.test_optimizer import Reader, adamw, tower

CLIP = 1.0
LOUD = 200.0  # a loss times this is clipped
SCALES = [1.0, 1.0, LOUD, 1.0, 1.0, 1.0, LOUD, LOUD, 1.0, 1.0]


class Trained:
    """A tower whose losses are multiplied so that some steps are clipped."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        undo_ratio: float = 1.0,
        device: str = "cpu",
        early: bool | None = True,
        clip: float = CLIP,
        **options: Any,
    ) -> None:
        chunk = options.pop("chunk_mb", SMALL * dtype.itemsize)
        model = options.pop("build", tower)()
        inner = options.pop("optimizer", hybrid)(model.parameters())
        self.model = GeminiDDP(
            model, device, dtype=dtype, min_chunk_size_mb=chunk, search_range_mb=chunk, prefetch=1, **options
        )
        self.optimizer = GeminiOptimizer(
            inner,
            self.model,
            clipping_norm=clip,
            update_in_backward=early,
            undo_ratio=undo_ratio,
            initial_scale=2**4,
        )
        self.tried = self.undone = 0

    def backward(self, words: Tensor, scale: float = 1.0, wait: bool = True) -> Tensor:
        ranks = self.model.chunk_manager.ranks
        own = words.chunk(ranks.size)[ranks.rank].to(self.model.chunk_manager.device)
        loss = loss_of(self.model, own) * scale
        self.optimizer.backward(loss)
        if wait:
            self.worker.wait_all()  # so that speculative updates have been made
        return loss.detach()

    def step(self, words: Tensor, scale: float = 1.0, wait: bool = True) -> Tensor:
        loss = self.backward(words, scale, wait)
        self.optimizer.step()
        self.optimizer.zero_grad()
        kinds = [event.kind for event in self.model.gemini_manager.timeline.events]
        self.tried += kinds.count("try")
        self.undone += kinds.count("undo")
        return loss

    @property
    def worker(self) -> Any:
        return self.model.gemini_manager.worker

    def everything(self) -> dict[str, Tensor]:
        """Weights and states of the serial model and optimizer."""
        found = dict(self.model.state_dict(only_rank_0=False))
        for number, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{number} {name}": value for name, value in state.items()})
        return found


def assert_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert torch.equal(value, others[name]), name


def loud(scales: list[float], dtype: torch.dtype, wait: bool, **options: Any) -> Trained:
    """Train with speculative updates and beside it with updates that wait for the norm; both must be the same
    to the last bit.
    """
    run, other = Trained(dtype, **options), Trained(dtype, undo_ratio=0.0, **options)
    for step, scale in enumerate(scales):
        got, expected = run.step(batch(step), scale, wait), other.step(batch(step), scale, wait)
        assert torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True), step
        assert run.optimizer.step_was_skipped == other.optimizer.step_was_skipped
    assert_equal(run.everything(), other.everything())
    assert other.tried == 0
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_good_steps_stand_and_clipped_ones_are_taken_back(dtype: torch.dtype, wait: bool) -> None:
    run = loud(SCALES, dtype, wait)
    if wait:  # otherwise the step may come before any of them has begun
        assert run.undone > 0
        assert run.tried > 2 * run.undone


def test_it_is_the_serial_training() -> None:
    run, serial = Trained(torch.float32), tower()
    optimizer = hybrid(serial.parameters())
    for step, scale in enumerate(SCALES):
        got = run.step(batch(step), scale)
        loss = loss_of(serial, batch(step)) * scale
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(serial.parameters(), CLIP)
        optimizer.step()
        assert torch.allclose(got, loss.detach(), rtol=1e-5), step
    assert run.undone > 0


def test_steps_that_overflow_are_taken_back() -> None:
    run = loud([1.0, 1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0], torch.float16, True)
    assert run.undone > 0


def test_without_going_back_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkSnapshot, "restore", lambda self: None)
    with pytest.raises(AssertionError):
        loud(SCALES, torch.bfloat16, True)


def test_the_digits_beside_bf16_weights_are_taken_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SpeculativeUpdates._restore

    def forgetful(updates: SpeculativeUpdates, update: Any) -> None:
        restore(updates, update)
        updates.updates.shadow.inner.versions.clear()  # type: ignore[attr-defined]

    monkeypatch.setattr(SpeculativeUpdates, "_restore", forgetful)
    with pytest.raises(AssertionError):
        loud(SCALES, torch.bfloat16, True)


def test_after_a_clipped_step_nothing_is_tried_until_one_is_not() -> None:
    run = Trained()
    tried = []
    for step, scale in enumerate([1.0, 1.0, LOUD, LOUD, 1.0, 1.0]):
        before = run.tried
        run.step(batch(step), scale)
        tried.append(run.tried > before)
    assert tried == [False, True, True, False, False, True]  # the first step makes the states


def test_what_the_step_finds_waiting_is_updated_once() -> None:
    run, other = Trained(), Trained(undo_ratio=0.0)
    for step, scale in enumerate(SCALES):
        hold = threading.Event()
        run.model.settle()
        run.worker.submit(-1, -1, "a long update", partial(hold.wait, 20))
        run.step(batch(step), scale, wait=False)
        hold.set()
        other.step(batch(step), scale)
    assert run.tried == 0
    assert_equal(run.everything(), other.everything())


def test_the_step_may_come_while_a_speculative_update_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Trained(), Trained(undo_ratio=0.0)
    began, hold = threading.Event(), threading.Event()
    settle = ChunkGradients.settle

    def slow(gradients: ChunkGradients) -> None:
        if threading.current_thread().name == "gemini-update":
            began.set()
            assert hold.wait(20)
        settle(gradients)

    monkeypatch.setattr(ChunkGradients, "settle", slow)
    for step in range(4):
        run.model.settle()
        began.clear()
        hold.clear()
        loss = loss_of(run.model, batch(step))
        run.optimizer.backward(loss)
        assert step == 0 or began.wait(20)
        run.optimizer.step()
        hold.set()
        run.optimizer.zero_grad()
        other.step(batch(step))
    assert_equal(run.everything(), other.everything())


def by_norm(run: Trained) -> None:
    run.optimizer.clip_grad_by_norm(0.01)


def by_value(run: Trained) -> None:
    run.optimizer.clip_grad_by_value(1e-3)


def other_rate(run: Trained) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def look(run: Trained) -> None:
    run.everything()


def forward(run: Trained) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(batch(9))
    run.model.train()


def whole(run: Trained) -> None:
    with run.model.whole_parameters():
        pass


def forget(run: Trained) -> None:
    run.optimizer.zero_grad()
    run.backward(batch(7))


def forget_the_model_s(run: Trained) -> None:
    run.model.zero_grad()
    run.backward(batch(7))


def again(run: Trained) -> None:
    """Adds to the gradients."""
    run.backward(batch(7))


def fail(run: Trained) -> None:
    """In the backward pass of another batch."""
    loss = loss_of(run.model, batch(7))
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.optimizer.backward(loss)


BETWEEN = [by_norm, by_value, other_rate, look, forward, whole, forget, forget_the_model_s, again, fail]


@pytest.mark.parametrize("between", BETWEEN)
def test_who_comes_between_the_backward_pass_and_the_step_sees_no_speculative_update(
    between: Callable[[Trained], None],
) -> None:
    run, other = Trained(), Trained(undo_ratio=0.0)
    for step in range(5):
        run.backward(batch(step))
        other.backward(batch(step))
        assert run.optimizer._speculative.has_pending or step not in (1, 3)
        for one in (run, other):
            if step in (1, 3):
                between(one)
            one.optimizer.step()
            one.optimizer.zero_grad()
        assert not run.optimizer._speculative.has_pending
    assert_equal(run.everything(), other.everything())


def test_before_the_step_a_checkpoint_has_the_weights_of_before() -> None:
    run = Trained()
    for step in range(3):
        run.step(batch(step))
    before = run.everything()
    run.backward(batch(3))
    assert run.optimizer._speculative.has_pending
    assert_equal(run.everything(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_several_passes(dtype: torch.dtype) -> None:
    run, other = Trained(dtype), Trained(dtype, undo_ratio=0.0)
    for step in range(4):
        for one in (run, other):
            with one.model.no_sync():
                one.backward(batch(step))
            one.step(batch(10 + step), LOUD if step == 2 else 1.0)
    assert run.undone > 0
    assert_equal(run.everything(), other.everything())


def test_after_loading_the_first_update_waits() -> None:
    run, other = Trained(), Trained(undo_ratio=0.0)
    for one in (run, other):
        for step in range(2):
            one.step(batch(step))
        saved = one.model.state_dict(), one.optimizer.state_dict()
        one.step(batch(2))
        one.model.load_state_dict(saved[0])
        one.optimizer.load_state_dict(saved[1])
        one.tried = 0
        one.step(batch(3))
        assert one.tried == 0
        one.step(batch(4))
    assert run.tried > 0
    assert_equal(run.everything(), other.everything())


class Winding(nn.Module):
    """From some step on, a layer is used by several segments of activation checkpointing: gradients come in
    parts.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(24, 12), nn.Linear(12, 24)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))  # each has its own chunk
        self.times = 1

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in list(self.layers) + [self.layers[-1]] * (self.times - 1):
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def test_gradients_that_come_after_a_speculative_update_are_not_lost() -> None:
    run, other = Trained(build=Winding), Trained(undo_ratio=0.0, build=Winding)
    for step in range(6):
        for one in (run, other):
            one.model.unwrap().times = 1 if step < 3 else 3
            one.step(batch(step))
    assert run.undone > 0
    assert_equal(run.everything(), other.everything())


class Features(nn.Module):
    """Layers of 16 features; ``kind`` says what is difficult about them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_used = True
        self.embed = nn.Embedding(24, 16)
        self.first, self.late = nn.Linear(16, 16), nn.Linear(16, 16)
        self.maybe, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.BatchNorm1d(16) if kind == "float32 parts" else nn.Identity()
        self.head = nn.Linear(16, 24)
        self.frozen.requires_grad_(kind != "frozen parts")
        # it needs weights long after their gradients have come
        self.reader = Reader(self.late) if kind == "stopped" else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        x = self.reader(self.frozen(torch.tanh(self.first(self.embed(words)))))
        x = self.norm(x.flatten(0, 1)).unflatten(0, words.shape)
        if self.is_used:
            x = torch.tanh(self.maybe(x))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.head(torch.tanh(self.late(x)))


KINDS = {  # with the dtype, elements of a chunk, and bytes of the compute tier that make it difficult
    "float32 parts": (torch.float16, 300, None),
    "frozen parts": (torch.float32, 900, 16_000),
    "stopped": (torch.float32, 300, 8_000),
    "used sometimes": (torch.bfloat16, 5_000, None),
}


@pytest.mark.parametrize("then", ["step", "look", "forget"])
@pytest.mark.parametrize("kind", KINDS)
def test_difficult_models(kind: str, then: str) -> None:
    dtype, elements, capacity = KINDS[kind]
    chunk = elements * dtype.itemsize / 2**20
    make = partial(Trained, dtype, build=partial(Features, kind), compute_capacity=capacity, chunk_mb=chunk)
    run, other = make(), make(undo_ratio=0.0)
    for step in range(8):
        for one in (run, other):
            one.model.unwrap().is_used = kind != "used sometimes" or step % 3 != 2
            if then != "step":
                one.backward(batch(20 + step))
                one.everything() if then == "look" else one.optimizer.zero_grad()
            one.step(batch(step), LOUD if step == 5 else 1.0)
    assert run.undone > 0
    assert_equal(run.everything(), other.everything())


@pytest.mark.parametrize("stays", [False, True])  # whether weights are fetched again
def test_two_backward_passes_after_two_forward_passes(stays: bool) -> None:
    run, other = Trained(strict_ddp_mode=stays), Trained(undo_ratio=0.0, strict_ddp_mode=stays)
    for step in range(4):
        for one in (run, other):
            losses = [loss_of(one.model, batch(10 * step + i)) for i in range(2)]
            for loss in losses:
                one.optimizer.backward(loss)
                one.worker.wait_all()
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert_equal(run.everything(), other.everything())


def test_after_loading_states_alone() -> None:
    """Masters wait there in the place of the digits beside bf16 weights, and are larger."""

    def large() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(24, 64), nn.Linear(64, 64), nn.Linear(64, 24))

    run, other = Trained(build=large), Trained(undo_ratio=0.0, build=large)
    for one in (run, other):
        for step in range(6):
            if step == 3:
                one.optimizer.load_state_dict(one.optimizer.state_dict())
            one.step(batch(step))
    assert run.tried > 0
    assert_equal(run.everything(), other.everything())


def test_room_on_the_host_goes_to_those_who_need_it() -> None:
    """Layers that are used for the first time get their gradients and states; snapshots get what is left."""

    def train(ratio: float, capacity: int | None) -> Trained:
        run = Trained(torch.float32, ratio, build=partial(Features, "used sometimes"), host_capacity=capacity)
        for step in range(6):
            run.model.unwrap().is_used = step >= 3
            run.step(batch(step))
        run.model.settle()
        return run

    plain = train(0.0, None)
    tight = train(1.0, plain.model.chunk_manager.host.peak)
    assert tight.tried > 0
    assert_equal(tight.everything(), plain.everything())


def test_clipping_by_hand_stops_speculative_updates() -> None:
    run = Trained()
    tried = []
    for step in range(5):
        before = run.tried
        run.backward(batch(step))
        run.optimizer.clip_grad_by_norm(100.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.tried += [e.kind for e in run.model.gemini_manager.timeline.events].count("try")
        tried.append(run.tried > before)
    assert tried == [False] * 5  # in the first step there was nothing to try, and from then on it is known


def on_ranks(rank: int, world_size: int, port: int, dtypes: list[torch.dtype]) -> None:
    launch(rank, world_size, port)
    for dtype in dtypes:
        assert loud(SCALES, dtype, True).undone > 0


def test_on_two_ranks() -> None:
    spawn(on_ranks, 2, dtypes=[torch.bfloat16, torch.float16])


@pytest.mark.slow
def test_on_four_ranks() -> None:
    spawn(on_ranks, 4, dtypes=[torch.float32, torch.bfloat16, torch.float16])


def with_room_on_one(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    run, other = Trained(undo_ratio=float(rank == 0)), Trained(undo_ratio=0.0)
    for step, scale in enumerate(SCALES):
        assert torch.equal(run.step(batch(step), scale), other.step(batch(step), scale)), step
    assert (run.tried > 0) == (rank == 0)
    assert_equal(run.everything(), other.everything())


def test_ranks_need_not_try_the_same_chunks() -> None:
    spawn(with_room_on_one, 2)


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 1.0])
def test_the_host_holds_a_share_twice(ratio: float) -> None:
    """Also where one layer is much larger than the others."""
    run = Trained(
        build=lambda: nn.Sequential(
            nn.Embedding(24, 8), *map(nn.Linear, [8, 99, 8, 8, 8], [99, 8, 8, 8, 24])
        ),
        undo_ratio=ratio,
    )
    for step in range(3):
        run.step(batch(step))
    run.model.settle()
    speculative = run.optimizer._speculative
    assert speculative is not None
    whole = sum(p.numel() for p in run.model.parameters()) * 12  # bf16 weights, their digits, two moments
    assert speculative.buffers.made <= 1.1 * ratio * whole  # with what is padded
    assert run.tried > 0
    if ratio == 1.0:
        assert speculative.buffers.made >= whole


def test_without_room_on_the_host_nothing_is_tried() -> None:
    plain = Trained(undo_ratio=0.0)
    plain.step(batch(0))
    plain.step(batch(1))
    plain.model.settle()
    used = plain.model.chunk_manager.host.peak
    run = Trained(host_capacity=used + 64)
    for step in range(4):
        run.step(batch(step))
    assert run.tried == 0


def test_without_a_promise_updates_are_speculative_without_clipping_too() -> None:
    run, waits = Trained(clip=0.0, early=None), Trained(clip=0.0, early=False)
    for step in range(6):
        for each in (run, waits):
            each.backward(batch(step))
            if step == 3:  # a script that looks at the gradients before the step
                each.optimizer.clip_grad_by_norm(0.01)
            each.optimizer.step()
            each.optimizer.zero_grad()
            kinds = [event.kind for event in each.model.gemini_manager.timeline.events]
            each.tried += kinds.count("try")
            each.undone += kinds.count("undo")
    assert waits.tried == 0
    assert run.tried > run.undone > 0
    assert_equal(run.everything(), waits.everything())


def test_without_a_promise_updates_wait_where_they_cannot_be_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [
        Trained(early=None, optimizer=each)
        for each in (adamw, partial(HybridAdam, nvme_offload_fraction=0.5))
    ]
    monkeypatch.setattr(speculative, "available_host_memory", lambda: 0)
    for run in (*runs, Trained(early=None), Trained(early=None, undo_ratio=0.0)):
        for step in range(3):
            run.step(batch(step))
        assert run.tried == 0


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="undo_ratio is a share from 0 to 1, got 2"):
        GeminiAdamOptimizer(small(tower()), undo_ratio=2)
    with pytest.raises(ValueError, match="update_in_backward is True, False or None, got 'auto'"):
        GeminiAdamOptimizer(small(tower()), update_in_backward="auto")
    with pytest.raises(
        ValueError,
        match="with clipping may have to take updates back, and those of AdamW cannot be; use HybridAdam",
    ):
        Trained(optimizer=adamw)
    with pytest.raises(
        ValueError, match=r"with clipping keeps on the host .* there is no room beside a disk tier"
    ):
        Trained(optimizer=partial(HybridAdam, nvme_offload_fraction=0.5))
    model = small(tower(), dtype=torch.float16)
    with pytest.raises(ValueError, match="with a loss scale may have to take updates back"):
        GeminiOptimizer(adamw(model.parameters()), model, update_in_backward=True)


def test_without_memory_for_it_all_updates_wait() -> None:
    """So everything may be had: there is nothing to take back."""
    for options in ({"optimizer": adamw}, {"optimizer": partial(HybridAdam, nvme_offload_fraction=0.5)}):
        run = Trained(undo_ratio=0.0, **options)
        for step in range(3):
            run.step(batch(step), LOUD)
        assert run.tried == 0


class _Before(HybridAdam):
    """Changes weights before the kernel."""

    def update(self, bucket: Any, group: dict[str, Any]) -> None:
        for weight in bucket.weights:
            weight.mul_(0.9)
        super().update(bucket, group)


class _Sign(HybridAdam):
    """Has a kernel of its own."""

    def update(self, bucket: Any, group: dict[str, Any]) -> None:
        for weight, grad, mean in zip(bucket.weights, bucket.grads, bucket.states["exp_avg"], strict=True):
            mean.lerp_(grad.float(), 0.1)
            weight.sub_(mean.sign() * group["lr"])


class _Counting(HybridAdam):
    """Has one more state."""

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*super().state_names(group), "seen")

    def update(self, bucket: Any, group: dict[str, Any]) -> None:
        for seen in bucket.states["seen"]:
            seen.add_(1)
        super().update(bucket, group)


@pytest.mark.parametrize("kind", [_Before, _Sign, _Counting])
def test_optimizers_made_of_ours(kind: type[HybridAdam]) -> None:
    run = loud(SCALES, torch.bfloat16, True, optimizer=partial(kind, lr=1e-2))
    assert run.undone > 0


def test_a_model_that_nobody_holds_is_freed() -> None:
    def train() -> weakref.ref[nn.Module]:
        run = Trained()
        for step in range(3):
            run.step(batch(step))
        assert run.tried > 0
        return weakref.ref(run.model)

    model = train()
    gc.collect()
    assert model() is None


def test_the_numbers_of_a_step_tell_of_speculative_updates() -> None:
    run = Trained()
    for step in range(4):
        run.step(batch(step))
    numbers = run.model.gemini_manager.timeline.numbers()
    assert numbers.tried == 8
    assert "(8 speculative, 0 of them rolled back)" in str(numbers)


def test_options_are_compared() -> None:
    assert same_options([{"lr": torch.tensor(1.0)}], [{"lr": torch.tensor(1.0)}])
    assert not same_options([{"lr": torch.tensor(1.0)}], [{"lr": torch.tensor(2.0)}])
    assert not same_options([{"lr": torch.tensor(1.0)}], [{"lr": 1.0}])
    assert not same_options([{"lr": 1.0}], [{"lr": 1.0, "eps": 0.1}])
