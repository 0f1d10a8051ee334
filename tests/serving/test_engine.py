"""``launch_engine``: any model, whole or cut, gives what it gives in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from colossalai.serving import (
    Answer,
    AsyncEngine,
    BatchManager,
    BatchManagerForGeneration,
    ListCache,
    MissCacheError,
    QueueFullError,
    ServiceError,
    StartError,
    SubmitEntry,
    TaskEntry,
    launch_engine,
)
from colossalai.testing import free_port

IDS = torch.arange(10).view(2, 5)


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=97, n_positions=32))


class Echo(nn.Module):
    """Gives back what it got, so that batches can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, **data: Any) -> Any:
        return (
            {name: value for name, value in data.items() if name != "crash"}
            if "crash" not in data
            else os._exit(5)
        )


def started(*arguments: Any, **options: Any) -> AsyncEngine:
    engine = launch_engine(*arguments, **options)
    assert engine is not None
    return engine


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(1, 1), (2, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, 1), (4, 1), (1, 2)))],
)
def test_a_cut_model_gives_what_the_whole_one_gives(tp: int, pp: int) -> None:
    want = gpt().eval()(input_ids=IDS).logits.detach()
    engine = started(tp, pp, "localhost", 0, 0, gpt)
    try:
        for i in range(3):
            engine.submit(i, {"input_ids": IDS + i})
        torch.testing.assert_close(engine.get(0)["logits"], want)
        assert [engine.get(i)["logits"].shape for i in (1, 2)] == [want.shape] * 2
        engine.submit("bad", {"input_ids": IDS + 90})
        with pytest.raises(ValueError, match=r"97|range"):
            engine.get("bad")
        engine.submit("after", {"input_ids": IDS})
        torch.testing.assert_close(asyncio.run(engine.wait("after"))["logits"], want)
        os.kill(engine.service.pids[tp * pp - 1], signal.SIGKILL)
        while engine.service.restarted == 0 or engine.service.state != "ready":
            assert engine.service.state != "ended"
        engine.submit("again", {"input_ids": IDS})
        torch.testing.assert_close(engine.get("again")["logits"], want)
    finally:
        engine.shutdown()


def test_the_queue_has_a_limit_and_a_dead_rank_fails_what_waits_for_it() -> None:
    engine = started(1, 1, "localhost", 0, 0, Echo, queue_size=1)
    try:
        engine.submit(0, {"x": 1})
        assert engine.get(0) == {"x": 1}
        os.kill(engine.service.pids[0], signal.SIGSTOP)
        engine.submit("sent", {"x": 1})
        while engine._queue:
            pass
        engine.submit("queued", {"x": 2})
        with pytest.raises(QueueFullError, match="size: 1"):
            engine.submit("refused", {})
        with pytest.raises(ValueError, match="already"):
            engine.submit("queued", {})
        with pytest.raises(KeyError, match="refused"):
            engine.get("refused")
        os.kill(engine.service.pids[0], signal.SIGKILL)
        with pytest.raises(ServiceError, match="rank 0 died"):
            engine.get("sent")
    finally:
        engine.shutdown()
    with pytest.raises(ServiceError, match="shut down"):
        engine.submit(1, {})


def test_batches_reach_the_model_and_their_rows_come_back() -> None:
    engine = started(1, 1, "localhost", 0, 0, Echo, batch_manager=Together())
    try:
        for i in range(4):
            engine.submit(i, i)
        assert sorted(engine.get(i) for i in range(4)) == [0, 1, 2, 3]
    finally:
        engine.shutdown()


def test_a_function_that_no_rank_can_find() -> None:
    with pytest.raises(StartError, match=r"cannot be given to them \(.*lambda.*that stand in a module"):
        launch_engine(1, 1, "localhost", 0, 0, lambda: gpt())


def test_what_cannot_be_sent_fails_alone() -> None:
    engine = started(1, 1, "localhost", 0, 0, Echo)
    try:
        engine.submit("object", {"x": object()})
        with pytest.raises(TypeError, match=r"cannot hold builtins\.object"):
            engine.get("object")
        engine.submit(1, {"x": 1})
        assert engine.get(1) == {"x": 1}
    finally:
        engine.shutdown()


class Fake:
    """A service that answers when the test says so."""

    def __init__(self) -> None:
        self.job = Mock(pp=1)
        self.asked: list[tuple[Any, Callable[[Answer], None]]] = []

    def ask(self, kind: str, value: Any, deliver: Callable[[Answer], None], *, everyone: bool) -> None:
        self.asked.append((value, deliver))

    def answer(self, index: int, output: Any) -> None:
        while len(self.asked) <= index:
            pass
        self.asked[index][1](Answer(index, {"output": output}))

    def close(self) -> None:
        pass


def faked(manager: BatchManager | None = None, **options: Any) -> tuple[AsyncEngine, Fake]:
    service: Any = Fake()
    return AsyncEngine(service, manager, verbose=False, **options), service


def test_a_name_given_anew_does_not_get_the_result_of_before() -> None:
    engine, service = faked(pipe_size=2)

    async def give_up_and_ask_again() -> Any:
        engine.submit("x", "first")
        waiting = asyncio.ensure_future(engine.wait("x"))
        while not service.asked:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engine.submit("x", "second")
        service.answer(0, "of the first")
        service.answer(1, "of the second")
        return await engine.wait("x")

    assert asyncio.run(give_up_and_ask_again()) == "of the second"
    engine.shutdown()


def test_a_request_that_was_given_up_does_not_harm_its_batch() -> None:
    engine, service = faked(Together())
    with engine._changed:  # so that both are in one batch
        engine.submit(0, 0)
        engine.submit(1, 1)
    while not service.asked:
        pass
    engine._results[0].cancel()
    service.answer(0, {"rows": ["a", "b"]})
    assert engine.get(1) == "b"
    engine.shutdown()


class Forgetful(BatchManager):
    """Takes all requests, and puts one into the batch; then takes none."""

    def make_batch(self, q: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        if q[0].data == "leave":
            return TaskEntry((), None), {}
        entries = [q.popleft() for _ in range(len(q))]
        return TaskEntry((entries[0].uid,), entries[0].data), {}


def test_a_batch_manager_that_loses_requests_is_told() -> None:
    engine, service = faked(Forgetful())
    with engine._changed:
        engine.submit(0, 0)
        engine.submit(1, 1)
    with pytest.raises(RuntimeError, match="put this request into no batch"):
        engine.get(1)
    service.answer(0, "a")
    assert engine.get(0) == "a"
    engine.submit(2, "leave")
    with pytest.raises(RuntimeError, match="put this request into no batch"):
        engine.get(2)
    engine.shutdown()


class Together(BatchManager):
    def make_batch(self, q: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        entries = [q.popleft() for _ in range(len(q))]
        return TaskEntry(tuple(e.uid for e in entries), {"rows": [e.data for e in entries]}), {}

    def split_batch(self, task_entry: TaskEntry, **kwargs: Any) -> Any:
        yield from zip(task_entry.uids, task_entry.batch["rows"], strict=True)


def _entry(uid: int, ids: list[int], most: int, **sampling: Any) -> SubmitEntry:
    return SubmitEntry(uid, {"input_ids": ids, "max_tokens": most, **sampling})


def test_generation_batches_follow_the_documented_rules() -> None:
    manager = BatchManagerForGeneration(max_batch_size=3, pad_token_id=9)
    q = deque(
        [
            _entry(0, [1, 2], 5, top_k=4),
            _entry(1, [1, 2, 3], 4, top_k=4),
            _entry(2, [7], 5, top_k=4),
            _entry(3, [7], 1, top_k=4),  # the batch is full
            _entry(4, [7], 2, top_k=4),  # more tokens than the head of its batch
            _entry(5, [7], 1, top_k=4, temperature=0.5),
            _entry(6, [7], 1, top_k=4),
        ]
    )
    task, info = manager.make_batch(q)
    assert task.uids == (0, 1, 2)
    assert task.batch["input_ids"].tolist() == [[9, 1, 2], [1, 2, 3], [9, 9, 7]]
    assert task.batch["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert task.batch["max_tokens"] == 3 + 5
    assert task.batch["top_k"] == 4
    assert "top_p" not in task.batch
    whole = torch.arange(24).view(3, 8)
    rows = dict(manager.split_batch(TaskEntry(task.uids, whole), **info))
    assert {uid: row.tolist() for uid, row in rows.items()} == {
        0: [1, 2, 3, 4, 5, 6, 7],
        1: [8, 9, 10, 11, 12, 13, 14],
        2: [18, 19, 20, 21, 22, 23],
    }
    assert [manager.make_batch(q)[0].uids for _ in range(4)] == [(3,), (4,), (5,), (6,)]
    with pytest.raises(ValueError, match="max_batch_size"):
        BatchManagerForGeneration(0)


def test_the_cache_hits_when_a_key_has_enough_results() -> None:
    cache = ListCache(2, 2, fixed_keys=["fixed"])

    def misses(key: str) -> bool:
        try:
            return cache.get(key) is None
        except MissCacheError:
            return True

    cache.add("a", 1)
    cache.add("a", 1)
    assert misses("a")
    cache.add("a", 2)
    cache.add("a", 3)
    assert {cache.get("a") for _ in range(50)} == {1, 2}
    for value in (1, 2):
        cache.add("b", value)
        cache.add("fixed", value)
    cache.get("a")
    for value in (1, 2):
        cache.add("c", value)  # b was used least recently
    assert [misses(key) for key in ("a", "b", "c", "fixed")] == [False, True, False, False]
    nothing = ListCache(0, 1)
    nothing.add("a", 1)
    with pytest.raises(MissCacheError):
        nothing.get("a")


def node(rank: int, master: int, rpc: int) -> None:
    """A script on one of two nodes."""
    engine = launch_engine(2, 1, "127.0.0.1", master, rpc, gpt, n_nodes=2, node_rank=rank)
    if engine is not None:
        engine.submit(0, {"input_ids": IDS})
        torch.testing.assert_close(engine.get(0)["logits"], gpt().eval()(input_ids=IDS).logits.detach())
        engine.shutdown()
    print(f"node {rank} is done")


def _two_nodes(secrets: tuple[str, str]) -> list[tuple[int, str]]:
    ports = f"{free_port()}, {free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from tests.serving.test_engine import node; node({rank}, {ports})"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"COLOSSALAI_SERVING_SECRET": secrets[rank]},
        )
        for rank in (0, 1)
    ]
    try:
        if secrets[0] != secrets[1]:
            output = nodes[1].communicate(timeout=300)[0]
            return [(0, ""), (nodes[1].returncode, output)]
        return [(one.wait(300), one.stdout.read()) for one in nodes]  # type: ignore[union-attr]
    finally:
        for one in nodes:
            one.kill()
            one.communicate()


def test_two_nodes_that_share_a_secret() -> None:
    done = _two_nodes(("a secret of the job",) * 2)
    assert [code for code, _ in done] == [0, 0], done
    assert "node 1 is done" in done[1][1]


@pytest.mark.slow
def test_a_node_with_another_secret_is_turned_away() -> None:
    (_, (code, output)) = _two_nodes(("a secret of the job", "another secret, no good"))
    assert code != 0
    assert "secret of the job" in output
