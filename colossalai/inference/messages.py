"""What the first rank tells the others before each step, as whole numbers.

A message is a header of fixed length, which says what happens and how many numbers follow, and these.  Real
numbers travel as their bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from colossalai.inference.requests import FinishReason, Sampling
from colossalai.inference.scheduler import Request
from colossalai.inference.stages import Team

FINISHES: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "error")
_NOTHING = -1


class Kind(IntEnum):
    """What a message is about."""

    STEP = 0
    END = 1
    """A call of ``generate`` is over."""
    COMPARE = 2
    """A call of ``generate`` begins; the ranks compare what they were given."""
    CLOSE = 3


@dataclass
class News:
    """What came to the first rank since the last step."""

    kind: Kind = Kind.STEP
    arrivals: list[Request] = field(default_factory=list)
    ended: list[tuple[int, FinishReason]] = field(default_factory=list)
    """Requests, by their numbers, that go no further."""
    again: bool = False
    """Whether the weights have changed."""
    digest: int = 0


def exchange(team: Team, news: News | None, again: bool = False) -> News:
    """The news of the first rank, on all ranks; the others give None.

    ``again`` of any rank is ``again`` of all: the weights of one stage may have changed alone.
    """
    if team.size == 1:
        assert news is not None
        news.again = again
        return news
    body = [] if news is None else _numbers(news)
    header = torch.tensor(
        [0, 0, int(again), 0] if news is None else [news.kind, len(body), int(again), news.digest]
    )
    kind, length, anew, digest = team.sum(header).tolist()
    if length:
        numbers = torch.tensor(body) if news is not None else torch.zeros(length, dtype=torch.int64)
        body = team.from_first(numbers).tolist()
    news = news or _read(Kind(kind), body, digest)
    news.again = anew > 0
    return news


def _numbers(news: News) -> list[int]:
    found = [len(news.ended)]
    for serial, finish in news.ended:
        found += [serial, FINISHES.index(finish)]
    for request in news.arrivals:
        found += _of_request(request)
    return found if len(found) > 1 else []


def _read(kind: Kind, body: Sequence[int], digest: int) -> News:
    news, left = News(kind, digest=digest), iter(body)
    if body:
        news.ended = [(next(left), FINISHES[next(left)]) for _ in range(next(left))]
        while (serial := next(left, None)) is not None:
            news.arrivals.append(_request(serial, left))
    return news


def _of_request(request: Request) -> list[int]:
    s = request.sampling
    optional = [_NOTHING if n is None else n for n in (s.seed, s.logprobs, s.prompt_logprobs)]
    real = [_bits(x) for x in (s.temperature, s.top_p, s.min_p, s.repetition_penalty)]
    tokens, ends = request.tokens, sorted(request.ends)
    return [
        request.serial, request.place, s.max_tokens, s.top_k, *optional, *real, len(ends), *ends,
        len(tokens), *tokens,
    ]  # fmt: skip


def _request(serial: int, left: Iterator[int]) -> Request:
    def take(count: int) -> list[int]:
        return [next(left) for _ in range(count)]

    place, max_tokens, top_k, *optional = take(6)
    seed, logprobs, prompt_logprobs = (None if n == _NOTHING else n for n in optional)
    temperature, top_p, min_p, penalty = (_real(n) for n in take(4))
    ends = frozenset(take(next(left)))
    sampling = Sampling(
        max_tokens=max_tokens,
        top_k=top_k,
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    return Request(serial, take(next(left)), sampling, ends, place=place)


def _bits(number: float) -> int:
    (found,) = struct.unpack("<q", struct.pack("<d", number))
    return int(found)


def _real(bits: int) -> float:
    (found,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(found)
