"""Requests that no client of good will sends: each gets a 4xx, and the server is as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from colossalai.cli.benchmark.load import Load, Mix, run_load
from tests.serving.servers import Here, Running, running

ROUTES = [
    "/generation",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
    "/docs",
]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 10**30, -(10**30), 1.5, 1e308, "", "x", "\0", "\ud800", "x" * 5000, [], {}),
    *([[]], [None], {"a": {}}, "NaN", [1, "x"], [-1], [10**12], [[1], [2]], "\U0001f642" * 50),
]
# fmt: off
FIELDS = [
    "prompt", "messages", "max_tokens", "max_new_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "n", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "seed", "model",
    "user", "suffix", "best_of", "logit_bias", "ignore_eos", "stop_token_ids", "greedy", "tools", "role",
    "__proto__", "content",
]
# fmt: on
PATHS = [*ROUTES, "/" * 50, "/..%2f..%2fetc/passwd", "/%00", "/\xff", "/v1/models/" + "a" * 3000, "*", ""]
VERBS = ["GET", "POST", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW", "\xff"]
LENGTHS = [
    *(["content-length: -1"], ["content-length: 99999999999"], ["content-length: 5", "content-length: 6"]),
    *(["transfer-encoding: chunked"], ["transfer-encoding: x"], []),
]
HEADERS = [
    *([], ["content-type: application/json"], ["content-type: multipart/form-data"], ["bad header"]),
    *(["content-type: application/json; charset=utf-16"], ["authorization: " + "x" * 9000]),
    *(["x: " + "y" * 70_000], ["expect: 100-continue"], ["connection: upgrade", "upgrade: websocket"]),
]


def head(draw: random.Random, body: bytes) -> bytes:
    """A request that is nearly one."""
    lines = [f"{draw.choice(VERBS)} {draw.choice(PATHS)} HTTP/1.1", "host: x"]
    lines += draw.choice([[f"content-length: {len(body)}"], *LENGTHS])
    lines += draw.choice(HEADERS)
    return "\r\n".join(lines).encode("latin1") + b"\r\n\r\n"


def body(draw: random.Random) -> bytes:
    fields = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randint(0, 6))}
    if draw.random() < 0.5:
        fields |= {"prompt": "x", "max_tokens": 2}
    data = json.dumps(fields).encode()
    for _ in range(draw.choice([0, 0, 1, 4])):
        at = draw.randrange(len(data))
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + draw.randint(0, 2) :]
    return draw.choice([data, data, data[: len(data) // 2], data * 40, b"", b"\xff" * 50, b"{" * 3000])


def hostile(url: str, seed: int, seconds: float = 0.5) -> bytes:
    """Send one; the status line that came back, or nothing."""
    draw = random.Random(seed)
    host, port = url.removeprefix("http://").split(":")
    data = body(draw)
    with socket.create_connection((host, int(port)), timeout=seconds) as sock, contextlib.suppress(OSError):
        sock.sendall(head(draw, data))
        for start in range(0, len(data), 1 << 14):
            sock.sendall(data[start : start + (1 << 14)])
        kind = draw.random()
        if kind < 0.1:
            return b""  # it leaves without a word
        if kind < 0.8:
            sock.shutdown(socket.SHUT_WR)
        return sock.recv(64)
    return b""


def memory(pid: int) -> int:
    """Bytes that a process holds."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def check(server: Here | Running, seeds: range) -> None:
    statuses = [hostile(server.url, seed).split(b" ")[1:2] for seed in seeds]
    assert [s for s in statuses if s and not s[0].startswith((b"2", b"3", b"4", b"1"))] == []
    assert sum(bool(s) for s in statuses) > len(statuses) // 3, "few were answered at all"
    got = httpx.post(f"{server.url}/generation", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    assert got.status_code == 200


def test_hostile_requests_get_no_5xx(server: Here) -> None:
    check(server, range(120))
    assert server.service.restarted == 0
    assert 'status="5' not in httpx.get(f"{server.url}/metrics").text


@pytest.fixture
def process() -> Iterator[Running]:
    with running("--body-timeout", "2", "--limit", "64") as found:
        yield found


@pytest.mark.slow
def test_a_thousand_hostile_requests_do_not_make_it_grow(process: Running) -> None:
    check(process, range(300))  # caches fill
    before = memory(process.process.pid)
    check(process, range(1000, 2000))
    grown = memory(process.process.pid) - before
    print(f"grown by {grown / 2**20:.1f} MiB over 1,000 hostile requests")
    assert grown < 16 << 20
    assert 'status="5' not in httpx.get(f"{process.url}/metrics").text


@pytest.mark.slow
def test_ten_thousand_queued_requests_are_refused_beyond_the_limit(process: Running) -> None:
    before = memory(process.process.pid)
    mixes = {"prompts": Mix.parse("2"), "outputs": Mix.parse("256")}
    found = asyncio.run(run_load(process.url, Load(requests=10_000, concurrency=500, **mixes)))
    refused = [sample.error for sample in found if sample.error is not None]
    assert {error.partition(":")[0] for error in refused} == {"429"}
    assert len(refused) < 10_000
    assert all(sample.tokens == 256 for sample in found if sample.error is None)
    assert memory(process.process.pid) - before < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("examples", [60])
def test_schemathesis_finds_no_server_error(server: Here, examples: int) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
        *("--checks", "not_a_server_error", "-n", str(examples), "--seed", "1", "--request-timeout", "20"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
