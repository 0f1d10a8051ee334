"""What a request asks for, and what comes back."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX = 2**63
ELSEWHERE = {
    "max_new_tokens": "give max_tokens",
    "max_length": "give max_tokens, which leaves out the prompt, or Generator(max_length=...)",
    "do_sample": "give temperature=0 where it would be False",
    "stop_token_ids": "give stop_tokens",
    "eos_token_id": "give stop_tokens",
    "stop_strings": "give stop",
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), "give the prompt so many times"),
    **dict.fromkeys(("num_beams", "use_beam_search", "length_penalty"), "there are no beams"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "there is repetition_penalty alone"),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "min_length"), "there is ignore_eos alone"),
}
"""What other libraries call it, and what is here instead."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and when it ends.

    ``temperature=0`` always takes the most likely token.  Otherwise one is drawn from ``softmax(logits /
    temperature)`` over the tokens that pass all of ``top_k`` (0: all pass), ``top_p`` and ``min_p`` (the
    least probability, as a share of that of the most likely token).  ``repetition_penalty`` divides the
    scores of tokens that are in the text already, and multiplies those below 0.  With ``seed`` the draws
    repeat, whatever the plan and the other requests are.

    A request ends after ``max_tokens``, at a string of ``stop`` (which its text leaves out), at a token of
    ``stop_tokens``, or at the model's own last token unless ``ignore_eos``.

    ``logprobs`` asks for the log-probability of every chosen token and of this many most likely ones beside
    it, ``prompt_logprobs`` for those of the prompt.  They are those of the model: temperature, filters and
    penalties do not change them.
    """

    def __new__(cls, *_: Any, **options: Any) -> Sampling:
        unknown = {name: ELSEWHERE[name] for name in options if name in ELSEWHERE}
        if unknown:
            words = "; ".join(f"for {name} {instead}" for name, instead in unknown.items())
            raise TypeError(f"Sampling has no {', '.join(unknown)}: {words}")
        return super().__new__(cls)

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(
                f"Sampling(stop={self.stop!r}): it is a tuple of strings; write ({self.stop!r},)"
            )
        for name in ("stop", "stop_tokens"):
            self._check(name, isinstance(getattr(self, name), Iterable), "a tuple")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            self._check_whole(name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            self._check(name, _is_number(getattr(self, name)), "a finite number")
        self._check("temperature", self.temperature >= 0, "0 (greedy) or more")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1: all tokens)")
        self._check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._check("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "0.001 to 1000 (1: none)")
        for text in self.stop:
            self._check("stop", isinstance(text, str) and text != "", "made of strings that are not empty")
        for token in self.stop_tokens:
            self._check("stop_tokens", _is_whole(token) and token >= 0, "made of numbers of tokens")

    def _check_whole(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("seed", "logprobs", "prompt_logprobs"):
            return
        self._check(name, _is_whole(value) and value >= 0, "a whole number of 0 or more")
        self._check(name, value < MAX, "below 2**63")  # ranks tell each other in int64

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"Sampling({name}={getattr(self, name)!r}): {name} must be {what}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < math.inf if isinstance(value, float) else abs(value) < MAX


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token where it stands, and the most likely tokens there with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Event:
    """What one step gave one request: its new tokens and text, and why it ended, if it did."""

    uid: Hashable
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Those of the prompt after its first token, with the first event, if they were asked for."""


OF_CALLS = {
    **dict.fromkeys(("input_ids", "inputs", "prompt_token_ids"), "give the prompts as the first argument"),
    "attention_mask": "give all that the tokenizer returned as the first argument, without **",
    "token_type_ids": "leave it out",
    "pad_token_id": "leave it out: nothing is padded",
    **dict.fromkeys(("generation_config", "sampling_params"), "give sampling=Sampling(...)"),
    "streamer": "call stream",
}
"""What other libraries give to a call that writes, and what to do here instead."""


def with_hints(call: Callable[P, R]) -> Callable[P, R]:
    """``call``, which says what the keywords of other libraries are called here."""
    known = set(inspect.signature(call).parameters)
    words, tail = dict(OF_CALLS), ""
    if "sampling" in known:
        words |= ELSEWHERE | {f.name: f"give {f.name}" for f in fields(Sampling)}
        tail = ". How tokens are chosen, and how many, is told by sampling=Sampling(...)"

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known and name in words]
        if unknown:
            told = "; ".join(f"for {name} {words[name]}" for name in unknown)
            raise TypeError(f"{call.__name__} has no {', '.join(unknown)}: {told}{tail}")
        return call(*args, **kwargs)

    return checked


@dataclass
class Completion:
    """A request that has ended."""

    uid: Hashable
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, event: Event) -> None:
        """Append what a step gave."""
        self.tokens += event.tokens
        self.text += event.text
        if event.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *event.logprobs]
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason, self.error = event.finish_reason, event.error


@dataclass(frozen=True)
class GeneratorStats:
    """Counts of a generator: what it holds now, and what it has done since it was made."""

    pages_used: int
    """Pages that requests hold."""
    pages_free: int
    """All others, of which some may have contents that a later request can reuse."""
    waiting: int
    running: int
    preempted: int
    """How often a request gave up its pages for others."""
    prefix_hits: int
    """Tokens of prompts that were found in pages and not computed."""
    prompt_tokens: int
    """Tokens that were computed and not chosen here: prompts, and what was computed again."""
    output_tokens: int
    steps: int
    finished: int

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))
