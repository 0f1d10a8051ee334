"""Runs the app: a port that is taken before anything else starts, and an end that lets answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from colossalai.serving.errors import StartError
from colossalai.serving.front import TextModel
from colossalai.serving.http.app import make_app
from colossalai.serving.http.settings import Settings
from colossalai.serving.service import Service


def bind(settings: Settings) -> socket.socket:
    """Take the port, before anything that is slow; one line if it is in use."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose"
            " another port"
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Knows from the first signal on that it takes no more requests, and then ends as any function does."""

    draining = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.draining = True
        super().handle_exit(sig, frame)


def patient(seconds: float) -> type[H11Protocol]:
    """A protocol that closes connections on which no whole head of a request comes for ``seconds``, or whose
    client does not read what is left once they are to be closed.
    """

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._seen: Any = None
            self._unread = -1
            self._timer = self.loop.call_later(seconds, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _look(self) -> None:
            unread = self.transport.get_write_buffer_size() if self.transport.is_closing() else -1
            # between two requests uvicorn's own timer (keep_alive) ends the connection
            busy = self.timeout_keep_alive_task is not None
            busy = busy or (self.cycle is not None and not self.cycle.response_complete)
            if unread > 0 and unread == self._unread:  # nothing was read since the last look
                self.transport.abort()
            elif not busy and self._seen is self.cycle:  # nothing has begun
                self.transport.close()
            # a connection that is busy now has not been idle at all: its client may be about to use it again
            self._seen, self._unread = object() if busy else self.cycle, unread
            self._timer = self.loop.call_later(seconds, self._look)

    return Patient


MakeApp = Callable[[Callable[[], bool], Callable[[], None]], Any]
"""Makes an app of two functions: whether the server is draining, and what to call once it listens."""


def make_server(
    make: MakeApp, service: Service, settings: Settings, *, announce: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """A server that is not running yet: ``run(sockets=[...])`` runs it, ``should_exit = True`` ends it."""
    server: _Server | None = None
    app = make(lambda: server is not None and server.draining, announce)
    server = _Server(
        uvicorn.Config(
            app,
            http=patient(settings.body_timeout),
            ws="none",
            log_level=settings.log_level,
            access_log=False,
            timeout_keep_alive=max(1, int(settings.keep_alive)),
            timeout_graceful_shutdown=max(1, int(settings.drain)),
            server_header=False,
            h11_max_incomplete_event_size=1 << 16,
        )
    )
    service.on_end = lambda reason: setattr(server, "should_exit", True)
    return server


def app_of(model: TextModel, settings: Settings) -> MakeApp:
    return lambda draining, on_start: make_app(model, settings, draining=draining, on_start=on_start)


def run(server: uvicorn.Server, sock: socket.socket) -> None:
    """Run ``server`` until it ends.  What was imported is not searched for garbage meanwhile: with torch and
    transformers that stops all answers for 150 ms each time.
    """
    gc.collect()
    gc.freeze()
    try:
        server.run(sockets=[sock])
    finally:
        gc.unfreeze()


def serve(
    model: TextModel,
    settings: Settings,
    sock: socket.socket,
    *,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests on ``sock`` until SIGTERM, SIGINT, or the end of the service."""
    server = make_server(app_of(model, settings), model.service, settings, announce=announce)
    try:
        run(server, sock)
    finally:
        model.close()
        sock.close()
