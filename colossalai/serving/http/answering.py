"""From accepted prompts to an answer: whole, or as a stream of events; timed, limited, and ended when the
client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from colossalai.inference import Sampling
from colossalai.serving.errors import QueueFullError, ServiceError
from colossalai.serving.front import PromptProgress, RequestError, TextModel
from colossalai.serving.http.guard import HttpRefusal, Receive, Scope, Send, error_body
from colossalai.serving.http.metrics import GenerationTimer, Metrics
from colossalai.serving.http.settings import Settings

T = TypeVar("T")


def printable(text: str) -> str:
    """``text`` as it can be sent: what a client has sent may hold halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, printable(message)
        self.code, self.param, self.kind = code, param, kind


class ClientGone(Exception):
    """Nobody waits for the answer."""


@dataclass(frozen=True)
class Context:
    """What the routes of one app share."""

    model: TextModel
    settings: Settings
    metrics: Metrics


@dataclass
class PromptAnswer:
    """All that has come for one prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, part: PromptProgress) -> None:
        self.tokens += part.tokens
        self.text += part.text
        self.logprobs += part.logprobs
        self.prompt_logprobs += part.prompt_logprobs
        self.finish_reason = part.finish_reason


Requests = Sequence[tuple[Sequence[int], Sampling]]


def as_api_error(error: Exception, queue_full: int = 429) -> ApiError:
    """What a client is told of ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(queue_full, str(error), "queue_full", kind="rate_limit_error")
    if isinstance(error, HttpRefusal):
        return ApiError(error.status, error.message, error.code)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.code, error.param)
    if isinstance(error, TimeoutError):
        return ApiError(
            408, "the answer took longer than this server allows", "timeout", kind="timeout_error"
        )
    if isinstance(error, ServiceError):
        return ApiError(503, str(error), "unavailable", kind="server_error")
    raise error


async def timed(context: Context, requests: Requests) -> AsyncGenerator[PromptProgress, None]:
    """The parts of ``TextModel.stream``, counted, and within the time that the server allows."""
    timers = [GenerationTimer(context.metrics, len(prompt)) for prompt, _ in requests]
    reason = "cancelled"
    try:
        stream = context.model.stream(requests, seconds=context.settings.request_timeout)
        async with contextlib.aclosing(stream) as parts:
            async for part in parts:
                timers[part.index].tokens(len(part.tokens))
                if part.finish_reason is not None:
                    timers[part.index].end(part.finish_reason)
                yield part
    except (ServiceError, QueueFullError, RequestError, TimeoutError):
        reason = "error"
        raise
    finally:
        for timer in timers:
            timer.end(reason)


async def collect(context: Context, request: Request, requests: Requests) -> list[PromptAnswer]:
    """The whole answers, unless the client leaves before."""

    async def gather() -> list[PromptAnswer]:
        choices = [PromptAnswer() for _ in requests]
        async with contextlib.aclosing(timed(context, requests)) as parts:
            async for part in parts:
                choices[part.index].add(part)
        return choices

    return await unless_gone(request.receive, gather())


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``; when the client leaves, it is cancelled and ``ClientGone`` raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_to_json = json.JSONEncoder(separators=(",", ":")).encode
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events of JSON objects, ended by ``[DONE]``; an error on the way is an event of its own.

    ``events`` yields those that are sent together, and None behind the last one: at the end of many streams
    every message of its own would keep the others waiting.  The first are awaited before the head is sent, so
    what is refused is refused with its status.
    """

    def __init__(self, events: AsyncGenerator[list[Any], None], path: str) -> None:
        self._events, self._path = events, path
        self._first: Any = None
        self.background = None

    @classmethod
    async def begin(cls, events: AsyncGenerator[list[Any], None], request: Request) -> EventStream:
        stream = cls(events, request.url.path)
        try:
            stream._first = await unless_gone(request.receive, anext(events))
        except BaseException:
            await stream._close()
            raise
        return stream

    async def _close(self) -> None:
        await self._events.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone, TimeoutError, OSError):
                await unless_gone(receive, self._send_all(send))
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_events(send, self._first)
        if self._first[-1] is None:
            return
        try:
            async for events in self._events:
                await _send_events(send, events)
                if events[-1] is None:
                    return
        except (ServiceError, RequestError, TimeoutError) as error:
            told = as_api_error(error)
            body = error_body("/v1", told.message, told.code, told.param, told.kind)
            await _send_events(send, [body, None])


async def _send_events(send: Send, events: list[Any]) -> None:
    pieces = [_DONE if event is None else b"data: %b\n\n" % _to_json(event).encode() for event in events]
    more = events[-1] is not None
    await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": more})
