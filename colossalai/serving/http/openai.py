"""The routes that clients of OpenAI know."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from colossalai.inference import Sampling
from colossalai.serving.front import RequestError, TextModel
from colossalai.serving.http.answering import ApiError, Context, EventStream, PromptAnswer, collect, timed
from colossalai.serving.http.schemas import ChatBody, Common, CompletionBody

router = APIRouter(prefix="/v1", tags=["OpenAI"])
_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


def _context(request: Request) -> Context:
    return request.app.state.context


@router.get("/models")
async def models(request: Request) -> Any:
    """The one model that is served."""
    context = _context(request)
    return {"object": "list", "data": [_model(context, request.app.state.started)]}


@router.get("/models/{name:path}", responses={404: {"description": "It is not the one that is served."}})
async def model(name: str, request: Request) -> Any:
    """The model of this name."""
    context = _context(request)
    _check_model(context.model, name)
    return _model(context, request.app.state.started)


def _model(context: Context, started: int) -> dict[str, Any]:
    model = context.model
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "colossalai",
        "max_model_len": model.max_length,
        "has_chat_template": model.chat_template is not None,
    }


def _check_model(model: TextModel, name: str | None) -> None:
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {model.name!r}",
            "model_not_found",
            "model",
        )


@router.post("/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    context = _context(request)
    _check_model(context.model, body.model)
    prompts = await _prompts(context.model, body)
    length = 16 if body.max_tokens is None else body.max_tokens
    for tokens in prompts:
        context.model.check(tokens, max(1, length))
    scored = body.logprobs if body.echo else None
    requests = [
        (tokens, _sampling(body, choice, max(1, length), body.logprobs, scored))
        for tokens in prompts
        for choice in range(body.n)
    ]
    _check_choices(context, requests)
    frame = _Frame("cmpl", "text_completion", context.model.name)
    if body.stream:
        return await EventStream.begin(_completion_events(context, body, requests, frame), request)
    choices = await collect(context, request, requests)
    if length == 0:  # the generator makes at least one token
        choices = [PromptAnswer(prompt_logprobs=c.prompt_logprobs, finish_reason="length") for c in choices]
    rows = []
    for index, (choice, (tokens, _)) in enumerate(zip(choices, requests, strict=True)):
        echoed = context.model.decode(tokens) if body.echo else ""
        listed = None
        if body.logprobs is not None:
            listed = _completion_logprobs(context.model, choice, tokens if body.echo else ())
        rows.append(_completion_row(index, echoed + choice.text, choice.finish_reason, listed))
    return JSONResponse({**frame.head(), "choices": rows, "usage": _usage(requests, choices, body.n)})


async def _prompts(model: TextModel, body: CompletionBody) -> list[list[int]]:
    if isinstance(body.prompt, str):
        return [await model.encode(body.prompt)]
    if isinstance(body.prompt[0], int):
        return [list(body.prompt)]
    return [await model.encode(one) if isinstance(one, str) else list(one) for one in body.prompt]


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer the last message of a conversation."""
    context = _context(request)
    model = context.model
    _check_model(model, body.model)
    tokens = await model.encode_chat([message.plain for message in body.messages])
    length = body.max_completion_tokens or body.max_tokens or max(1, model.max_length - len(tokens))
    model.check(tokens, length, param="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = [(tokens, _sampling(body, choice, length, logprobs, None)) for choice in range(body.n)]
    _check_choices(context, requests)
    frame = _Frame("chatcmpl", "chat.completion", model.name)
    if body.stream:
        return await EventStream.begin(_chat_events(context, body, requests, frame), request)
    choices = await collect(context, request, requests)
    rows = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(model, choice.logprobs) if body.logprobs else None,
            "finish_reason": _REASONS.get(choice.finish_reason or "", "stop"),
        }
        for index, choice in enumerate(choices)
    ]
    return JSONResponse({**frame.head(), "choices": rows, "usage": _usage(requests, choices, body.n)})


def _check_choices(context: Context, requests: Sequence[Any]) -> None:
    if len(requests) > context.settings.max_choices:
        raise ApiError(
            400,
            f"this asks for {len(requests)} answers (prompts times n); the server allows"
            f" {context.settings.max_choices}",
            "too_many_choices",
            "n",
        )


def _sampling(body: Common, choice: int, length: int, logprobs: int | None, scored: int | None) -> Sampling:
    try:
        return Sampling(
            max_tokens=length,
            temperature=body.temperature,
            top_k=max(0, body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            # the answers to one prompt differ, and each repeats
            seed=None if body.seed is None else (body.seed + choice) % (1 << 63),
            stop=body.stops,
            stop_tokens=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=scored,
        )
    except ValueError as error:
        raise RequestError(str(error)) from error


class _Frame:
    """What all objects of one answer have alike."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.id, self.kind, self.model = f"{prefix}-{uuid.uuid4().hex}", kind, model
        self.created = int(time.time())

    def head(self, suffix: str = "") -> dict[str, Any]:
        return {"id": self.id, "object": self.kind + suffix, "created": self.created, "model": self.model}


def _usage(requests: Sequence[Any], choices: Sequence[PromptAnswer], n: int) -> dict[str, int]:
    prompt = sum(len(tokens) for tokens, _ in requests[::n])
    output = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def _completion_events(
    context: Context, body: CompletionBody, requests: Any, frame: _Frame
) -> AsyncGenerator[list[Any], None]:
    offsets = [0] * len(requests)

    def row(part: Any) -> Any:
        listed = None
        if body.logprobs is not None:
            listed = _completion_logprobs(
                context.model, PromptAnswer(logprobs=list(part.logprobs)), (), offsets[part.index]
            )
            offsets[part.index] += sum(map(len, listed["tokens"]))
        return _completion_row(part.index, part.text, part.finish_reason, listed)

    async with aclosing(_events(context, body, requests, frame.head(), row)) as stream:
        async for events in stream:
            yield events


async def _chat_events(
    context: Context, body: ChatBody, requests: Any, frame: _Frame
) -> AsyncGenerator[list[Any], None]:
    head = frame.head(".chunk")

    def row(part: Any) -> Any:
        return {
            "index": part.index,
            "delta": {"content": part.text} if part.text or part.finish_reason is None else {},
            "logprobs": _chat_logprobs(context.model, part.logprobs) if body.logprobs else None,
            "finish_reason": None if part.finish_reason is None else _REASONS[part.finish_reason],
        }

    delta = {"role": "assistant", "content": ""}
    openings = [
        {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        for index in range(len(requests))
    ]
    async with aclosing(_events(context, body, requests, head, row)) as stream:
        async for events in stream:  # the first part has come: what is refused has a status of its own
            yield [*openings, *events]
            openings = []


async def _events(
    context: Context, body: Common, requests: Any, head: dict[str, Any], row: Callable[[Any], Any]
) -> AsyncGenerator[list[Any], None]:
    """Chunks with one choice each, with the last one, if it is wanted, the usage, and then None."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    more = {"usage": None} if wants_usage else {}
    choices = [PromptAnswer() for _ in requests]
    async with aclosing(timed(context, requests)) as parts:
        async for part in parts:
            choices[part.index].add(part)
            events: list[Any] = [{**head, "choices": [row(part)], **more}]
            if all(choice.finish_reason is not None for choice in choices):
                if wants_usage:
                    events.append({**head, "choices": [], "usage": _usage(requests, choices, body.n)})
                events.append(None)
            yield events


def _completion_row(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    finish = None if reason is None else _REASONS.get(reason, "stop")
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _completion_logprobs(
    model: TextModel, choice: PromptAnswer, prompt: Sequence[int], offset: int = 0
) -> dict[str, Any]:
    """Of the prompt, if it is echoed, the first token has no probability."""
    listed: list[Any] = [*choice.prompt_logprobs, *choice.logprobs] if prompt else choice.logprobs
    tokens = [model.piece(prompt[0])] if prompt else []
    values: list[float | None] = [None] if prompt else []
    tops: list[dict[str, float] | None] = [None] if prompt else []
    for token, value, top in listed:
        tokens.append(model.piece(token))
        values.append(_finite(value))
        tops.append(_by_text(model, [(token, value), *((t, v) for t, v in top if t != token)]))
    starts = []
    for text in tokens:
        starts.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": starts}


def _by_text(model: TextModel, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by the texts of tokens; a text that was there already is that of another token."""
    found: dict[str, float] = {}
    for token, value in likely:
        text = model.piece(token)
        found[f"token_id:{token}" if text in found else text] = _finite(value)
    return found


def _finite(logprob: float) -> float:
    """JSON has no infinity; for what is impossible OpenAI says -9999."""
    return logprob if math.isfinite(logprob) else -9999.0


def _chat_logprobs(model: TextModel, listed: Sequence[Any]) -> dict[str, Any]:
    def one(token: int, value: float) -> dict[str, Any]:
        text = model.piece(token)
        spelled = None if model.is_part(token) else list(text.encode(errors="replace"))
        return {"token": text, "logprob": _finite(value), "bytes": spelled}

    return {
        "content": [
            {**one(token, value), "top_logprobs": [one(t, v) for t, v in top]} for token, value, top in listed
        ]
    }
