"""The app: routes, pages, and what is said of errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import colossalai.serving.http.generation as generation
import colossalai.serving.http.openai as openai
from colossalai._version import __version__
from colossalai.serving.errors import QueueFullError, ServiceError
from colossalai.serving.front import RequestError, TextModel
from colossalai.serving.http.answering import ApiError, ClientGone, Context, as_api_error, printable
from colossalai.serving.http.guard import Guard, error_body
from colossalai.serving.http.metrics import Metrics
from colossalai.serving.http.settings import Settings
from colossalai.serving.service import Service

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
DOCS = {"/docs": "docs.html", "/docs.js": "docs.js"}
PAGES = {"/": "page.html", "/page.js": "page.js", **DOCS}
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8"}


def make_app(
    model: TextModel,
    settings: Settings = Settings(),  # noqa: B008
    *,
    draining: Callable[[], bool] = lambda: False,
    on_start: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The ASGI app of a model, for any ASGI server; ``colossalai.serving.http.serve`` runs one."""
    metrics = Metrics(model.service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_start()
        yield

    app = bare_app(f"The model {model.name}.", lifespan)
    app.state.context = Context(model, settings, metrics)
    app.state.generate = generation.generate_text
    app.include_router(openai.router)
    finish(app, model.service, settings, metrics, draining, PAGES)
    return app


def bare_app(description: str, lifespan: Any) -> FastAPI:
    return FastAPI(
        title="colossalai",
        version=__version__,
        description=description,
        docs_url=None,  # FastAPI's own pages load scripts from another host
        redoc_url=None,
        lifespan=lifespan,
    )


def finish(
    app: FastAPI,
    service: Service,
    settings: Settings,
    metrics: Metrics,
    draining: Callable[[], bool],
    pages: Mapping[str, str],
) -> None:
    """Add what every app has: ``/generation``, status, pages, errors, limits."""
    app.state.service, app.state.settings, app.state.metrics = service, settings, metrics
    app.state.started = int(time.time())
    app.state.draining = draining
    app.include_router(generation.router)
    _add_status(app)
    _add_pages(app, pages)
    _add_errors(app)
    app.add_middleware(Guard, settings=settings, metrics=metrics, draining=draining)
    if settings.allow_origins:  # outermost, so that pages of these hosts can read what the guard refuses, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )


def _add_status(app: FastAPI) -> None:
    @app.get("/health", tags=["Status"], responses={503: {"description": "It does not take requests now."}})
    async def health(request: Request) -> Response:
        """Whether requests are taken, for load balancers."""
        service = request.app.state.service
        state = "draining" if request.app.state.draining() else service.state
        more = {"reason": service.reason} if service.reason else {}
        return JSONResponse({"status": state, **more}, 200 if state == "ready" else 503)

    @app.get("/metrics", tags=["Status"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counters in the text format of Prometheus."""
        text = request.app.state.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI, pages: Mapping[str, str]) -> None:
    for path, name in pages.items():
        content = (files("colossalai.serving.http") / "pages" / name).read_bytes()
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        kind = _TYPES[name.rpartition(".")[2]]
        app.add_api_route(path, _page(content, headers, kind), include_in_schema=False)


def _page(content: bytes, headers: dict[str, str], kind: str) -> Callable[..., Any]:
    async def page() -> Response:
        return Response(content, headers=headers, media_type=kind)

    return page


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, error: ApiError) -> Response:
        body = error_body(request.url.path, error.message, error.code, error.param, error.kind)
        headers = {"retry-after": "1"} if error.status in (429, 406, 503) else {}
        return JSONResponse(body, error.status, headers)

    async def told(request: Request, error: Exception) -> Response:
        return answer(request, as_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = [_fault(fault) for fault in error.errors()[:8]]
        if "json" not in request.headers.get("content-type", ""):
            faults = [
                {"loc": ["body"], "msg": "send JSON, as content-type: application/json", "type": "json"}
            ]
        if not request.url.path.startswith("/v1"):
            return JSONResponse({"detail": faults}, 422)
        places = [".".join(fault["loc"][1:]) for fault in faults]
        told = [f"{place or 'body'}: {fault['msg']}" for place, fault in zip(places, faults, strict=True)]
        return answer(
            request, ApiError(400, "; ".join(told), "invalid_value", places[0].partition(".")[0] or None)
        )

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        body = error_body(request.url.path, str(error.detail), None)
        return JSONResponse(body, error.status_code, headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    for kind in (ApiError, RequestError, QueueFullError, ServiceError, TimeoutError):
        app.add_exception_handler(kind, told)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)


def _fault(fault: Any) -> dict[str, Any]:
    """Without the value that was sent: it may be long, or no JSON."""
    place, message = fault["loc"], str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "json_invalid":
        place, message = place[:1], f"it is no JSON: {fault['ctx']['error']} at character {place[1]}"
    return {
        "loc": [printable(str(part))[:100] for part in place],
        "msg": printable(message)[:300],
        "type": fault["type"],
    }
