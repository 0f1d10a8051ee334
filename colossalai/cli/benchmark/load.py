"""Requests with stated lengths and arrival times to a server, and when their tokens came.

Prompts are random tokens, and answers have exactly the length that was drawn, so that two runs with one seed
ask the same.  The client speaks HTTP by itself: no library's own work is measured beside the server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LINE = 1 << 22  # bytes of the longest line of a stream


@dataclass(frozen=True)
class Mix:
    """Lengths and how often each is drawn: ``128``, or ``32:0.7,512:0.3``."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Mix:
        pairs = [part.partition(":") for part in text.split(",")]
        try:
            lengths = tuple(int(length) for length, _, _ in pairs)
            weights = tuple(float(weight) if colon else 1.0 for _, colon, weight in pairs)
        except ValueError:
            raise ValueError(
                f"a mix of lengths is written as 128 or as 32:0.7,512:0.3, got {text!r}"
            ) from None
        if min(lengths) < 1 or min(weights) <= 0:
            raise ValueError(f"lengths must be at least 1, and their shares above 0, got {text!r}")
        return cls(lengths, weights)

    def draw(self, source: random.Random) -> int:
        return source.choices(self.lengths, self.weights)[0]

    def __str__(self) -> str:
        whole = sum(self.weights)
        parts = zip(self.lengths, self.weights, strict=True)
        return ", ".join(f"{length} ({weight / whole:.0%})" for length, weight in parts)


@dataclass(frozen=True)
class Load:
    """What is asked: ``rate`` is the mean number of requests in a second (0: all at once), with exponential
    pauses between them; at most ``concurrency`` are under way.
    """

    requests: int = 200
    prompts: Mix = field(default_factory=lambda: Mix.parse("128"))
    outputs: Mix = field(default_factory=lambda: Mix.parse("128"))
    rate: float = 0.0
    concurrency: int = 64
    vocabulary: int = 250
    seed: int = 0
    temperature: float = 0.0

    def draw(self) -> list[tuple[float, dict[str, Any]]]:
        """The second in which each request is sent, and its body."""
        source, now, drawn = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            prompt = [source.randrange(3, self.vocabulary) for _ in range(self.prompts.draw(source))]
            body = {
                "prompt": prompt,
                "max_tokens": self.outputs.draw(source),
                "temperature": self.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            drawn.append((now, body))
            now += source.expovariate(self.rate) if self.rate else 0.0
        return drawn


@dataclass
class Sample:
    """What one request saw; times are in seconds since it was sent."""

    prompt: int
    wanted: int
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    """Seconds after the beginning of the load."""
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """The mean time of a token after the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


async def run_load(url: str, load: Load, *, key: str | None = None, timeout: float = 600) -> list[Sample]:
    """Send all requests of ``load`` to the server at ``url``; the samples are in the order of sending."""
    target = Target.parse(url, key)
    gate = asyncio.Semaphore(load.concurrency)
    drawn = load.draw()
    began = time.monotonic()

    async def one(at: float, body: dict[str, Any]) -> Sample:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        async with gate:
            sample = Sample(len(body["prompt"]), body["max_tokens"], time.monotonic() - began)
            try:
                await asyncio.wait_for(_ask(target, body, sample), timeout)
            except asyncio.TimeoutError:  # in Python 3.10 not the built-in one
                sample.error = f"no answer within {timeout:g} s"
            except (OSError, EOFError, ValueError, KeyError) as error:
                sample.error = f"{type(error).__name__}: {error}"
            sample.ended = time.monotonic() - began
            return sample

    return list(await asyncio.gather(*(one(at, body) for at, body in drawn)))


@dataclass(frozen=True)
class Target:
    """Where the server is."""

    host: str
    port: int
    path: str
    key: str | None

    @classmethod
    def parse(cls, url: str, key: str | None) -> Target:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the server's address must be as http://localhost:8000, got {url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1"), key)

    @asynccontextmanager
    async def post(self, path: str, body: Any) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
        """The status of an answer, and a reader that stands before its body."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LINE)
        try:
            data = json.dumps(body).encode()
            key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
            head = f"POST {self.path}{path} HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n{key}"
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            yield status, reader
        finally:
            writer.close()


async def _ask(target: Target, body: Any, sample: Sample) -> None:
    began = time.monotonic()
    async with target.post("/v1/completions", body) as (status, reader):
        if status != 200:
            sample.error = f"{status}: {_message(await reader.read(1 << 16))}"
            return
        async for event in _events(reader):
            if "error" in event:
                sample.error = str(event["error"]["message"])
                return
            now = time.monotonic() - began
            if event["choices"]:
                sample.first = now if sample.first is None else sample.first
                sample.last = now
                sample.text += event["choices"][0]["text"]
            if event.get("usage"):
                sample.tokens = event["usage"]["completion_tokens"]
    if not sample.tokens:
        sample.error = "the stream ended early"


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """The JSON of each event.  Lengths of chunks are lines that do not begin with ``data:``."""
    while line := await reader.readline():
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def _message(data: bytes) -> str:
    try:
        body = json.loads(data)
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
