"""A generator without a model: every token follows from the prompt, so any answer can be checked."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from colossalai.inference import Event, GeneratorStats, Sampling, TokenLogprobs

VOCABULARY = 256
EOS = 0


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that follow ``prompt``: bytes of letters, so texts are readable and tell whose they are."""
    key = sum((i + 1) * token for i, token in enumerate(prompt)) + len(prompt)
    return [97 + (key * (i + 3) + i * i) % 26 for i in range(count)]


@dataclass
class _Running:
    prompt: list[int]
    sampling: Sampling
    done: int = 0
    text: str = ""


class StandIn:
    """As ``Generator``: requests on the first rank, steps on all."""

    def __init__(self, *, max_requests: int = 8, delay: float = 0.0, tokens_per_step: int = 1) -> None:
        self._slots, self._delay, self._per_step = max_requests, delay, tokens_per_step
        self._requests: dict[Hashable, _Running] = {}
        self._cancelled: list[Hashable] = []
        self._steps = self._tokens = 0
        self._several = dist.is_initialized() and dist.get_world_size() > 1

    def submit(self, prompt: Any, sampling: Sampling = Sampling(), *, uid: Hashable = None) -> Hashable:  # noqa: B008
        if not prompt:
            raise ValueError("an empty prompt")
        if uid in self._requests:
            raise ValueError(f"uid {uid} twice")
        self._requests[uid] = _Running(list(prompt), sampling)
        return uid

    def cancel(self, uid: Hashable) -> None:
        self._requests.pop(uid, None)

    @property
    def idle(self) -> bool:
        return not self._requests

    def step(self) -> list[Event]:
        self._meet(1)
        if self._requests and self._delay:
            time.sleep(self._delay)
        self._steps += 1
        return [self._advance(uid) for uid in list(self._requests)[: self._slots]]

    def _advance(self, uid: Hashable) -> Event:
        running = self._requests[uid]
        sampling = running.sampling
        tokens = answer(running.prompt, sampling.max_tokens)[running.done : running.done + self._per_step]
        running.done += len(tokens)
        self._tokens += len(tokens)
        event = Event(uid, tokens, bytes(tokens).decode())
        if sampling.logprobs is not None:
            event.logprobs = [
                TokenLogprobs(t, -0.5, tuple((t + i, -0.5 - i) for i in range(sampling.logprobs)))
                for t in tokens
            ]
        if sampling.prompt_logprobs is not None and running.done == len(tokens):
            event.prompt_logprobs = [TokenLogprobs(t, -1.0) for t in running.prompt[1:]]
        running.text += event.text
        for stop in sampling.stop:
            if stop in running.text:
                kept = running.text.index(stop) - (len(running.text) - len(event.text))
                event.text, event.finish_reason = event.text[: max(0, kept)], "stop"
        if running.done >= sampling.max_tokens and event.finish_reason is None:
            event.finish_reason = "length"
        if event.finish_reason is not None:
            del self._requests[uid]
        return event

    def _meet(self, word: int) -> int:
        if not self._several:
            return word
        told = torch.tensor([word])
        dist.broadcast(told, 0)
        return int(told)

    def follow(self) -> None:
        while self._meet(0):
            pass

    def stats(self) -> GeneratorStats:
        running = min(len(self._requests), self._slots)
        return GeneratorStats(
            running,
            100 - running,
            len(self._requests) - running,
            running,
            0,
            0,
            0,
            self._tokens,
            self._steps,
            0,
        )

    def close(self) -> None:
        self._meet(0)


def stand_in(*, fail: str = "", **options: Any) -> StandIn:
    """Build one; ``fail`` lets the build go wrong on the last rank."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if fail == "raise" and last:
        raise ValueError("this model cannot be built")
    if fail == "exit" and last:
        os._exit(3)
    return StandIn(**options)
