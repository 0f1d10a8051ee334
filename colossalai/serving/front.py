"""``TextModel``: a service of ranks as a model that takes texts, for coroutines of one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from colossalai.inference import Sampling
from colossalai.serving.errors import ServiceError
from colossalai.serving.service import Answer, Service


class RequestError(ValueError):
    """A request that cannot be answered; ``param`` names the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclasses.dataclass(frozen=True)
class PromptProgress:
    """What has come for one of several prompts since the last part."""

    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Any, ...] = ()
    prompt_logprobs: tuple[Any, ...] = ()
    finish_reason: str | None = None


class TextModel:
    """The model behind a service: its tokenizer, the length of its context, and streams of its answers.

    Args:
        max_length: tokens of a prompt and its answer together.
        name: what clients call the model.
        chat_template: a template in the language of transformers, in place of the tokenizer's own.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Any,
        *,
        max_length: int,
        name: str = "model",
        chat_template: str | None = None,
    ) -> None:
        self.service, self.tokenizer = service, tokenizer
        self.max_length, self.name = max_length, name
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self._pieces: dict[int, str] = {}
        # one thread: tokenizers are not made to be used by several, and a long text must not stop the others
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._arrived: deque[tuple[asyncio.Queue[tuple[int, Answer]], int, Answer]] = deque()
        self._lock = threading.Lock()

    async def encode(self, text: str, *, param: str = "prompt") -> list[int]:
        """The tokens of ``text``, as the model was trained on them."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{param} holds half of a surrogate pair, which is no text", param=param
            ) from None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: list(self.tokenizer(text)["input_ids"]))

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the model's answer begins."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with"
                " --chat-template",
                param="messages",
                code="no_chat_template",
            )
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self._executor, self._render, messages)
        except Exception as error:  # a template may refuse a conversation with any exception
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return await self._encode_rendered(text)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, add_generation_prompt=True, tokenize=False
            )
        )

    async def _encode_rendered(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("messages hold half of a surrogate pair", param="messages") from None
        loop = asyncio.get_running_loop()
        tokenize = lambda: list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        return await loop.run_in_executor(self._executor, tokenize)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """The text of one token; its number where it is a part of a character."""
        found = self._pieces.get(token)
        if found is None:
            text = str(self.tokenizer.decode([token]))
            found = self._pieces[token] = f"token_id:{token}" if "\ufffd" in text else text
        return found

    def is_part(self, token: int) -> bool:
        """Whether a token is a part of a character, which has no text."""
        return "\ufffd" in str(self.tokenizer.decode([token]))

    def check(self, prompt: Sequence[int], max_tokens: int, *, param: str = "prompt") -> None:
        """Refuse what the model cannot take."""
        if not prompt:
            raise RequestError(f"{param} has no tokens", param=param)
        size = len(self.tokenizer)
        if any(token < 0 or token >= size for token in prompt):
            raise RequestError(f"{param} holds tokens that are not from 0 to {size - 1}", param=param)
        if len(prompt) + max_tokens > self.max_length:
            raise RequestError(
                f"this model's context is {self.max_length} tokens; {param} has {len(prompt)} and"
                " max_tokens is"
                f" {max_tokens}, together {len(prompt) + max_tokens}",
                param=param,
                code="context_length_exceeded",
            )

    async def stream(
        self, requests: Sequence[tuple[Sequence[int], Sampling]], *, seconds: float = math.inf
    ) -> AsyncGenerator[PromptProgress, None]:
        """Yield what comes for each of ``requests``, in the order in which it comes; close it to cancel.

        All requests are accepted, or none: ``QueueFullError`` and ``ServiceError`` come before the first
        part.  ``TimeoutError``: it took longer than ``seconds``.
        """
        queue: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        uids: dict[int, int] = {}
        late = Answer(0)
        timer = loop.call_later(seconds, queue.put_nowait, (-1, late)) if seconds < math.inf else None
        try:
            for index, (prompt, sampling) in enumerate(requests):
                request = {"prompt": list(prompt), "sampling": dataclasses.asdict(sampling)}
                uids[index] = self.service.ask("generate", request, self._deliver(loop, queue, index))
            while uids:
                found = [await queue.get()]
                while not queue.empty():
                    found.append(queue.get_nowait())
                if any(answer is late for _, answer in found):
                    raise TimeoutError(f"no whole answer within {seconds:g} s")
                for index in dict.fromkeys(index for index, _ in found):
                    answers = [answer for i, answer in found if i == index]
                    if answers[-1].last:
                        uids.pop(index, None)
                    yield _join(index, answers)
        finally:
            if timer is not None:
                timer.cancel()
            for uid in uids.values():
                self.service.cancel(uid)

    def _deliver(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], index: int) -> Any:
        def deliver(answer: Answer) -> None:
            with self._lock:
                first = not self._arrived
                self._arrived.append((queue, index, answer))
            if first:  # the loop is woken once for all that one step gave
                try:
                    loop.call_soon_threadsafe(self._hand_out)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    with self._lock:
                        self._arrived.clear()

        return deliver

    def _hand_out(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
        for queue, index, answer in arrived:
            queue.put_nowait((index, answer))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _join(index: int, answers: Sequence[Answer]) -> PromptProgress:
    """One part of several answers; raises what went wrong."""
    values = []
    for answer in answers:
        if answer.failure is not None:
            raise ServiceError(answer.failure)
        value = answer.value
        if value.get("kind") == "invalid":
            raise RequestError(value["error"])
        if value.get("error") is not None or value.get("finish_reason") == "error":
            raise ServiceError(value.get("error") or "the generator gave up this request")
        values.append(value)
    return PromptProgress(
        index,
        tuple(token for value in values for token in value.get("tokens", ())),
        "".join(value.get("text", "") for value in values),
        tuple(one for value in values for one in value.get("logprobs", ())),
        tuple(one for value in values for one in value.get("prompt_logprobs", ())),
        values[-1].get("finish_reason"),
    )
