"""What every request passes before a route sees it: the key, the limits of size and time, and the counters.

The body is read here, whole, so that no route waits for a slow client, and a body over the limit is refused
before it is in memory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from colossalai.serving.http.metrics import Metrics
from colossalai.serving.http.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/page.js", "/docs", "/docs.js", "/openapi.json")
"""What needs no key: it says nothing of what others ask."""


class HttpRefusal(Exception):
    """A request that no route shall see; ``close``: nor will more of it be read."""

    def __init__(self, status: int, message: str, code: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.close = status, message, code, close


class Gone(Exception):
    """The client left before its body was whole."""


async def within(seconds: float, work: Awaitable[T], late: str) -> T:
    """The result of ``work``; later than after ``seconds`` it is an ``HttpRefusal`` with ``late``."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:  # in Python 3.10 not the built-in one
        raise HttpRefusal(408, late, "timeout", close=True) from None


class Guard:
    """The outermost layer of the app."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics, draining: Callable[[], bool]) -> None:
        self.app, self.settings, self.metrics, self.draining = app, settings, metrics, draining
        self._held = 0  # bytes of the bodies that are being read or answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        sent, body = _Sent(send), _Body()
        try:
            await self._answer(scope, receive, sent, body)
        finally:
            self._held -= body.size
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(sent.status or 499)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: _Sent, body: _Body) -> None:
        settings = self.settings
        # a client that does not read would keep its answer in memory for ever
        most = settings.request_timeout + settings.body_timeout
        try:
            self._check(scope)
            late = f"the body did not arrive within {settings.body_timeout:g} s"
            await within(settings.body_timeout, self._read(scope, receive, body), late)
            late = f"the answer took longer than {most:g} s"
            await within(most, self.app(scope, _replayed(body.join(), receive), send), late)
        except HttpRefusal as refusal:
            if send.status is None:
                await refuse(scope, send, refusal)
        except Gone:
            return

    def _check(self, scope: Scope) -> None:
        if self.draining() and scope["path"] != "/health":
            raise HttpRefusal(503, "the server is shutting down", "unavailable", close=True)
        if scope["path"] not in OPEN and scope["method"] != "OPTIONS" and not self._knows_key(scope):
            raise HttpRefusal(401, "send the API key as Authorization: Bearer KEY", "invalid_api_key")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # a proxy in front of us may believe the other one, and see other requests than we do
            both = "a request has a content-length or a transfer-encoding, not both"
            raise HttpRefusal(400, both, "invalid_request", close=True)

    def _knows_key(self, scope: Scope) -> bool:
        key = self.settings.api_key
        if key is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, sent = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), key.encode())

    async def _read(self, scope: Scope, receive: Receive, body: _Body) -> None:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self.settings.max_body:
            raise self._too_large()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            self._held += body.add(message.get("body", b""))
            if body.size > self.settings.max_body:
                raise self._too_large()
            if self._held > self.settings.max_bodies * self.settings.max_body:
                many = "the requests of the moment are too large together; ask again later"
                raise HttpRefusal(429, many, "too_busy", close=True)
            more = message.get("more_body", False)

    def _too_large(self) -> HttpRefusal:
        limit = f"the body is over the limit of {self.settings.max_body} bytes"
        return HttpRefusal(413, limit, "body_too_large", close=True)


class _Body:
    """What has come of a body."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> int:
        self._pieces.append(piece)
        self.size += len(piece)
        return len(piece)

    def join(self) -> bytes:
        whole, self._pieces = b"".join(self._pieces), []
        return whole


class _Sent:
    """Passes on what is sent and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


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


async def refuse(scope: Scope, send: Send, refusal: HttpRefusal) -> None:
    body = json.dumps(error_body(scope["path"], refusal.message, refusal.code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")] if refusal.close else []
    headers += [(b"www-authenticate", b"Bearer")] if refusal.status == 401 else []
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
