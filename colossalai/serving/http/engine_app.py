"""``POST /generation`` in front of an ``AsyncEngine``, with batches and a cache."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request

from colossalai.serving.engine import AsyncEngine
from colossalai.serving.errors import QueueFullError, ServiceError
from colossalai.serving.http.answering import ApiError, as_api_error, unless_gone
from colossalai.serving.http.app import DOCS, bare_app, finish
from colossalai.serving.http.guard import HttpRefusal, within
from colossalai.serving.http.metrics import GenerationTimer, Metrics
from colossalai.serving.http.schemas import GenerationBody
from colossalai.serving.http.server import make_server, run
from colossalai.serving.http.settings import Settings
from colossalai.serving.list_cache import ListCache, MissCacheError

MAX_PROMPT = 512
"""Tokens of a prompt; longer ones are cut."""


class EngineText:
    """Continues texts by an engine whose model generates.

    A key of the cache is ``(prompt, max_tokens)``, as ``fixed_keys`` are; where a request says how tokens are
    drawn, that belongs to its key, unless the pair is a fixed one.
    """

    def __init__(
        self, engine: AsyncEngine, tokenizer: Any, cache: ListCache | None = None, fixed_keys: Any = ()
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._cache = cache
        self._fixed = set(fixed_keys)
        self._uids = itertools.count()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def __call__(self, body: GenerationBody, request: Request) -> str:
        key = self._key(body)
        if self._cache is not None:
            try:
                return str(self._cache.get(key))
            except MissCacheError:
                pass
        settings, metrics = request.app.state.settings, request.app.state.metrics
        late = f"the answer took longer than the {settings.request_timeout:g} s that this server allows"
        work = within(settings.request_timeout, self._generate(body, metrics), late)
        try:
            text = await unless_gone(request.receive, work)
        except (ServiceError, QueueFullError, HttpRefusal) as error:
            raise as_api_error(error, queue_full=406) from error
        except (ValueError, TypeError) as error:
            raise ApiError(422, str(error), "invalid_value") from error
        if self._cache is not None:
            self._cache.add(key, text)
        return text

    async def _generate(self, body: GenerationBody, metrics: Metrics) -> str:
        # in one thread, since tokenizers are not made to be used by several
        ids = await asyncio.get_running_loop().run_in_executor(self._executor, self._encode, body.prompt)
        data: dict[str, Any] = {"input_ids": ids, "max_tokens": body.length}
        data |= {"top_k": body.top_k, "top_p": body.top_p}
        data["temperature"] = 0.0 if body.greedy else body.temperature
        uid = next(self._uids)
        self.engine.submit(uid, data)
        timer, reason = GenerationTimer(metrics, len(ids)), "error"
        try:
            output = list(map(int, await self.engine.wait(uid)))
            timer.whole(len(output) - len(ids))
            reason = "length" if len(output) == len(ids) + body.length else "stop"
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        finally:
            timer.end(reason)
        return str(self.tokenizer.decode(output, skip_special_tokens=True))

    def _encode(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])[:MAX_PROMPT]

    def _key(self, body: GenerationBody) -> Hashable:
        pair = (body.prompt, body.length)
        drawn = (body.top_k, body.top_p, body.temperature, body.greedy)
        return pair if pair in self._fixed or not any(drawn) else (*pair, *drawn)


def make_engine_app(
    text: EngineText,
    settings: Settings,
    *,
    draining: Callable[[], bool] = lambda: False,
    on_start: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An app with ``/generation``, ``/docs``, ``/health`` and ``/metrics``."""
    service = text.engine.service
    metrics = Metrics(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_start()
        yield

    app = bare_app("A model that continues texts.", lifespan)
    app.state.generate = text
    finish(app, service, settings, metrics, draining, DOCS)
    return app


def serve_engine(
    text: EngineText, settings: Settings, sock: socket.socket, *, announce: Callable[[], None] = lambda: None
) -> None:
    """Answer requests on ``sock`` until SIGTERM, SIGINT, or the end of the service; then the engine ends."""
    server = make_server(
        lambda draining, on_start: make_engine_app(text, settings, draining=draining, on_start=on_start),
        text.engine.service,
        settings,
        announce=announce,
    )
    try:
        run(server, sock)
    finally:
        sock.close()
        text.engine.shutdown()
