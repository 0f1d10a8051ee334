"""What every request passes before a route sees it: the key, the limits of size and time, and the counters.

The body is read here, whole, so that no route waits for a slow client, and a body over the limit is refused
before it is in memory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from colossalai.serving.http.metrics import Metrics
from colossalai.serving.http.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/page.js", "/docs", "/docs.js", "/openapi.json")
"""What needs no key: it says nothing of what others ask."""


class TooLarge(Exception):
    pass


class Gone(Exception):
    pass


class Guard:
    """The outermost layer of the app."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics, draining: Callable[[], bool]) -> None:
        self.app, self.settings, self.metrics, self.draining = app, settings, metrics, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        sent = _Sent(send, self.settings.request_timeout)
        try:
            await self._answer(scope, receive, sent)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(sent.status or 499)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining() and scope["path"] != "/health":
            await refuse(scope, send, 503, "the server is shutting down", "unavailable", close=True)
            return
        if scope["path"] not in OPEN and scope["method"] != "OPTIONS" and not self._knows_key(scope):
            await refuse(scope, send, 401, "send the API key as Authorization: Bearer KEY", "invalid_api_key")
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self.settings.body_timeout)
        except TooLarge:
            limit = f"the body is over the limit of {self.settings.max_body} bytes"
            await refuse(scope, send, 413, limit, "body_too_large", close=True)
            return
        except TimeoutError:
            slow = f"the body did not arrive within {self.settings.body_timeout:g} s"
            await refuse(scope, send, 408, slow, "timeout", close=True)
            return
        except Gone:
            return
        await self.app(scope, _replayed(body, receive), send)

    def _knows_key(self, scope: Scope) -> bool:
        key = self.settings.api_key
        if key is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + key.encode())

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self.settings.max_body:
            raise TooLarge
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.settings.max_body:
                raise TooLarge
            if not message.get("more_body", False):
                return b"".join(pieces)


class _Sent:
    """Passes on what is sent and remembers the status.

    A client that stops reading would keep an answer in memory for ever, so each piece has a time limit.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await asyncio.wait_for(self._send(message), self._seconds)


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def error_body(path: str, message: str, code: str | None, param: str | None = None, kind: str = "") -> Any:
    """An error in the form that clients of this path expect: OpenAI's under /v1, else FastAPI's."""
    if not path.startswith("/v1"):
        return {"detail": message}
    return {
        "error": {"message": message, "type": kind or "invalid_request_error", "param": param, "code": code}
    }


async def refuse(
    scope: Scope, send: Send, status: int, message: str, code: str, *, close: bool = False
) -> None:
    body = json.dumps(error_body(scope["path"], message, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if close else []
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
