"""``POST /generation``: the route of older clients, whose text is the prompt and its continuation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from colossalai.inference import Sampling
from colossalai.serving.front import RequestError
from colossalai.serving.http.answering import ApiError, Context, as_api_error, collect
from colossalai.serving.http.schemas import GenerationAnswer, GenerationBody

router = APIRouter(tags=["Energon-AI"])


@router.post(
    "/generation",
    response_model=GenerationAnswer,
    responses={406: {"description": "The queue is full."}, 422: {"description": "A field is wrong."}},
)
async def generate(body: GenerationBody, request: Request) -> Any:
    """Continue a prompt."""
    return {"text": await request.app.state.generate(body, request)}


async def generate_text(body: GenerationBody, request: Request) -> str:
    """By the model of the app."""
    context: Context = request.app.state.context
    try:
        tokens = await context.model.encode(body.prompt)
        context.model.check(tokens, body.length)
        (choice,) = await collect(context, request, [(tokens, sampling_of(body))])
    except RequestError as error:
        raise ApiError(422, str(error), error.code, error.param) from error
    except Exception as error:
        raise as_api_error(error, queue_full=406) from error
    return body.prompt + choice.text


def sampling_of(body: GenerationBody) -> Sampling:
    if body.greedy:
        return Sampling(max_tokens=body.length, temperature=0.0)
    return Sampling(
        max_tokens=body.length,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
    )
