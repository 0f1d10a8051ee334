"""The core: every request has one end, whatever happens to the ranks."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from colossalai.serving import Answer, Generation, Job, QueueFullError, Service, ServiceError, StartError
from colossalai.serving.worker import Post
from tests.serving.stand_in import answer, stand_in


@contextmanager
def service(*, tp: int = 1, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Service]:
    made = Service(Job(Generation, {"build": stand_in, "options": options or {}}, tp=tp), **settings)
    try:
        made.start()
        yield made
    finally:
        made.close()


def ask(to: Service, prompt: list[int], count: int) -> queue.Queue[Answer]:
    answers: queue.Queue[Answer] = queue.Queue()
    to.ask("generate", {"prompt": prompt, "sampling": {"max_tokens": count}}, answers.put)
    return answers


def end_of(answers: queue.Queue[Answer], timeout: float = 20) -> tuple[list[int], Answer]:
    tokens: list[int] = []
    while not (got := answers.get(timeout=timeout)).last:
        tokens += got.value["tokens"]
    return tokens + (got.value or {}).get("tokens", []), got


def until(state: str, of: Service, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while of.state != state and time.monotonic() < deadline:
        time.sleep(0.01)
    assert of.state == state, of.reason


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_is_killed_fails_what_is_pending_and_is_replaced(tp: int) -> None:
    with service(tp=tp, options={"delay": 0.02}) as running:
        prompts = [[i, 5, i * i] for i in range(1, 6)]
        asked = [ask(running, prompt, 8) for prompt in prompts]
        assert [end_of(one)[0] for one in asked] == [answer(prompt, 8) for prompt in prompts]
        endless = [ask(running, [7, 7], 100_000) for _ in range(5)]
        endless[0].get(timeout=20)
        killed = time.monotonic()
        os.kill(running.pids[tp - 1], signal.SIGKILL)
        for one in endless:
            failure = end_of(one)[1].failure
            assert failure is not None
            assert f"rank {tp - 1} died" in failure
            assert "SIGKILL" in failure
        assert time.monotonic() - killed < 10
        until("ready", running)
        assert end_of(ask(running, [1, 2], 8))[0] == answer([1, 2], 8)
        assert running.restarted == 1


def test_ranks_that_hang_are_told_by_their_stacks_and_replaced() -> None:
    told: list[str] = []
    with service(tp=2, options={"delay": 0.02}, patience=1.5, log=told.append) as running:
        endless = ask(running, [7, 7], 100_000)
        endless.get(timeout=20)
        os.kill(running.pids[1], signal.SIGSTOP)
        assert "hang" in (end_of(endless)[1].failure or "")
        assert any("rank 0 waits in broadcast" in line and "rank 1 does not answer" in line for line in told)
        until("ready", running)
        assert end_of(ask(running, [1, 2], 8))[0] == answer([1, 2], 8)


def test_a_service_whose_ranks_die_too_often_ends_with_the_reason() -> None:
    ended: list[str] = []
    with service(restarts=0, options={"delay": 0.02}, on_end=ended.append) as running:
        endless = ask(running, [7], 100_000)
        os.kill(running.pids[0], signal.SIGKILL)
        assert end_of(endless)[1].failure
        until("ended", running)
        with pytest.raises(ServiceError, match="rank 0 died"):
            ask(running, [1], 1)
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("raise", "rank 1 failed: ValueError: this model cannot be built"),
        ("exit", "rank 1 died.*exit code 3"),
    ],
)
def test_a_start_that_fails_is_one_line(fail: str, message: str) -> None:
    told: list[str] = []
    with pytest.raises(StartError, match=message), service(tp=2, options={"fail": fail}, log=told.append):
        pass


def test_one_who_raises_does_not_stop_the_answers_to_others() -> None:
    told: list[str] = []
    with service(log=told.append) as running:

        def raises(answer: Answer) -> None:
            raise ValueError("mine")

        running.ask("generate", {"prompt": [1], "sampling": {"max_tokens": 2}}, raises)
        assert end_of(ask(running, [1, 2], 3))[0] == answer([1, 2], 3)
    assert any("could not be delivered" in line and "mine" in line for line in told)


def test_secrets_are_not_printed() -> None:
    job = Job(Generation, tp=2, nodes=2, secret=b"not for logs, this")
    assert "not for logs" not in repr(job)
    assert "not for logs" not in repr(Post(0, job, "", 0, {"COLOSSALAI_API_KEY": "not for logs"}))


def test_the_limit_cancelled_requests_and_the_end() -> None:
    with service(options={"delay": 0.02}, limit=2) as running:
        answers: queue.Queue[Answer] = queue.Queue()
        request = {"prompt": [3], "sampling": {"max_tokens": 100_000}}
        uids = [running.ask("generate", request, answers.put) for _ in range(2)]
        with pytest.raises(QueueFullError, match="size: 2"):
            ask(running, [1], 1)
        running.cancel(uids[0])
        assert end_of(ask(running, [1, 2], 3))[0] == answer([1, 2], 3)
        bad = ask(running, [], 3)
        assert end_of(bad)[1].value["kind"] == "invalid"
        running.cancel(uids[1])
        assert running.pending == 0
        last = ask(running, [1], 100_000)
    assert "shut down" in (end_of(last)[1].failure or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp of at least 1"),
        ({"tp": 3, "nodes": 2}, "cannot be shared evenly"),
        ({"tp": 2, "nodes": 2}, "COLOSSALAI_SERVING_SECRET"),
        ({"node_rank": 1}, "node_rank"),
    ],
)
def test_jobs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(Generation, **options)


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = Job(Generation, {"build": stand_in, "options": {}}, port=taken.getsockname()[1])
        with pytest.raises(StartError, match="choose another port"):
            Service(job).start()
