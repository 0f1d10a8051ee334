"""The gradients of one chunk: each is in exactly one place, whichever thread asks for the sum."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from colossalai.zero.gemini import OutOfCapacity
from colossalai.zero.gemini.chunk_gradients import ChunkGradients, SpilledGradients
from colossalai.zero.gemini.tiers import PendingCopy
from tests.zero.gemini.runs import Case, Training, batch, loss_of
from tests.zero.gemini.test_disk import small_host


class SlowCopy(PendingCopy):
    """A copy that takes a while to arrive."""

    def finish(self) -> None:
        time.sleep(0.05)


def after_two_passes() -> ChunkGradients:
    run = Training(Case())
    for _ in range(2):
        run.optimizer.backward(loss_of(run.model, batch(0)))
    return next(state for state in run.model.gradients.of.values() if state.summands)


def test_two_threads_that_settle_add_each_summand_once() -> None:
    state = after_two_passes()
    assert state.shard is not None
    first, state.summands = state.shard.clone(), [(more, SlowCopy()) for more, _ in state.summands]
    threads = [threading.Thread(target=state.settle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(state.shard, 2 * first)
    assert not state.summands


def test_what_is_released_is_released_once() -> None:
    state = after_two_passes()
    memory, slots = state.memory, state.slots()
    seen, taken = state.peek(), state.release()
    assert seen is not None
    assert taken is not None
    assert seen.used == taken.used == slots
    assert not state.has_any()
    assert state.release() is None
    assert state.peek() is None
    first = seen.shard.clone() if seen.shard is not None else None
    torch.testing.assert_close(taken.sum_up(memory), 2 * first)


def test_gradients_that_cannot_go_to_the_disk_stay_on_the_host(tmp_path: object) -> None:
    run = Training(small_host(str(tmp_path), 0.5, Case()))
    run.optimizer.backward(loss_of(run.model, batch(0)))
    state = next(s for s in run.model.gradients.of.values() if s.shard is not None)
    before = state.shard.clone() if state.shard is not None else None
    with pytest.MonkeyPatch.context() as patch:

        def full(spilled: SpilledGradients, chunk: object, shard: object) -> str:
            raise OutOfCapacity("the disk is full")

        patch.setattr(SpilledGradients, "write", full)
        with pytest.raises(OutOfCapacity, match="the disk is full"):
            state.evict_shard()
    assert not state.is_on_disk
    torch.testing.assert_close(state.shard, before)
    assert state.evict_shard()
    assert state.is_on_disk
    pending = state.release()
    assert pending is not None
    torch.testing.assert_close(pending.sum_up(state.memory), before)
