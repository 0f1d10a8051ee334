"""Many clients at once: nothing is lost, doubled or mixed up, and a dead rank leaves nobody waiting."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from typing import Any

import httpx
import pytest

from colossalai.cli.benchmark.load import Load, Mix, percentile, run_load
from tests.serving.servers import Here, Running, here, running, until_ready
from tests.serving.stand_in import answer
from tests.serving.test_hostile import memory


async def ask(client: httpx.AsyncClient, url: str, number: int, longest: int) -> tuple[float, str | None]:
    """One request of the mix: the seconds that it took, and what was wrong with the answer."""
    draw = random.Random(number)
    prompt = f"{number}:" + "".join(draw.choices("abcdef ", k=draw.randint(1, 200)))
    count = draw.randint(1, longest)
    kind = draw.choice(["generation", "completion", "stream", "chat"])
    wanted = answer(prompt.encode(), count)
    began = time.monotonic()
    try:
        if kind == "generation":
            got = await client.post(f"{url}/generation", json={"prompt": prompt, "max_tokens": count})
            text = got.json()["text"].removeprefix(prompt) if got.status_code == 200 else got.text
        elif kind == "completion":
            got = await client.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": count})
            text = got.json()["choices"][0]["text"] if got.status_code == 200 else got.text
        elif kind == "stream":
            text = await _stream(client, f"{url}/v1/completions", {"prompt": prompt, "max_tokens": count})
        else:
            wanted = answer(f"user: {prompt}\nassistant:".encode(), count)
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": count}
            text = await _stream(client, f"{url}/v1/chat/completions", body)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return time.monotonic() - began, repr(error)
    wrong = None if text == bytes(wanted).decode() else f"{kind} {number}: {text[:200]!r}"
    return time.monotonic() - began, wrong


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    text = ""
    async with client.stream("POST", url, json={**body, "stream": True}) as stream:
        if stream.status_code != 200:
            return f"{stream.status_code}: {(await stream.aread()).decode()}"
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error: {event['error']['message']}"
                for choice in event["choices"]:
                    text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


async def clients(url: str, count: int, requests: int, longest: int = 40) -> list[tuple[float, str | None]]:
    gate = asyncio.Semaphore(count)
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:

        async def one(number: int) -> tuple[float, str | None]:
            async with gate:
                return await ask(client, url, number, longest)

        return list(await asyncio.gather(*(one(number) for number in range(requests))))


def test_answers_are_not_mixed_up(server: Here) -> None:
    found = asyncio.run(clients(server.url, 16, 120))
    assert [wrong for _, wrong in found if wrong] == []
    assert server.service.pending == 0


def test_a_rank_killed_under_load_leaves_nobody_waiting() -> None:
    with here(tp=2, options={"delay": 0.01}) as server:

        async def load_and_kill() -> tuple[list[tuple[float, str | None]], float]:
            asked = asyncio.ensure_future(clients(server.url, 16, 60, longest=100))
            while server.service.pending < 8:
                await asyncio.sleep(0.01)
            killed = time.monotonic()
            os.kill(server.service.pids[1], signal.SIGKILL)
            return await asked, time.monotonic() - killed

        found, seconds = asyncio.run(load_and_kill())
        wrong = [one for _, one in found if one]
        assert wrong
        assert [one for one in wrong if "rank 1 died" not in one] == []
        assert seconds < 30
        until_ready(server.url)
        assert [one for _, one in asyncio.run(clients(server.url, 4, 8)) if one] == []


def test_the_load_of_the_command_is_what_was_stated(server: Here) -> None:
    mixes = {"prompts": Mix.parse("5:0.7,40:0.3"), "outputs": Mix.parse("8,16")}
    load = Load(requests=40, rate=200.0, concurrency=8, **mixes)
    samples = asyncio.run(run_load(server.url, load))
    assert [sample.error for sample in samples] == [None] * 40
    for (_, body), sample in zip(load.draw(), samples, strict=True):
        assert sample.text == bytes(answer(body["prompt"], body["max_tokens"])).decode()
        assert sample.tokens == sample.wanted
        assert 0 < (sample.first or 0) <= (sample.last or 0) <= sample.ended - sample.sent
    assert {sample.prompt for sample in samples} == {5, 40}
    refused = asyncio.run(run_load(server.url, Load(requests=2, prompts=Mix.parse("600"))))
    assert "context is 512 tokens" in (refused[0].error or "")
    for text in ("", "x", "5:0", "0", "5:x"):
        with pytest.raises(ValueError, match=r"mix|lengths"):
            Mix.parse(text)


@pytest.mark.slow
def test_two_thousand_requests_of_64_clients() -> None:
    with running("--delay", "0.001", "--slots", "64") as server:
        asyncio.run(clients(server.url, 64, 300))
        before = _memory(server)
        began = time.monotonic()
        found = asyncio.run(clients(server.url, 64, 2000))
        seconds, grown = time.monotonic() - began, _memory(server) - before
        times = [one for one, _ in found]
        print(
            f"2,000 requests of 64 clients in {seconds:.1f} s, p50 {percentile(times, 0.5):.2f} s,"
            f" p99 {percentile(times, 0.99):.2f} s, memory grown by {grown / 2**20:.1f} MiB"
        )
        assert [wrong for _, wrong in found if wrong] == []
        assert grown < 32 << 20
        assert "colossalai_pending 0.0" in httpx.get(f"{server.url}/metrics").text


def _memory(server: Running) -> int:
    return memory(server.process.pid) + sum(map(memory, server.ranks))
