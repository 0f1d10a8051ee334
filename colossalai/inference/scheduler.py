"""What is computed in each step: a pure function of the requests that came and the tokens that were chosen.

Every rank runs a scheduler of its own, and all decide alike.  A step has at most ``chunk`` tokens: first one
of each request that writes, then parts of prompts in the order in which the requests came.  When pages run
out, the request that came last gives up its own and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from colossalai.inference.pages import PagePool
from colossalai.inference.requests import FinishReason, Sampling

MOST_SCORED = 512
"""Rows of a step whose scores are wanted beside those that a token is chosen from."""


@dataclass(eq=False)
class Request:
    """A request, and how far it has come."""

    serial: int
    tokens: list[int]
    sampling: Sampling
    ends: frozenset[int]
    """The tokens after which it stops."""
    prompt: int = field(init=False)
    """How many of the tokens are its prompt."""
    computed: int = 0
    """How many tokens have their keys and values in pages."""
    scored: int = 0
    """How many tokens of the prompt have given the log-probability of the next one."""
    pages: list[int] = field(default_factory=list)
    noted: int = 0
    seat: int = -1
    finish: FinishReason | None = None
    error: str | None = None
    place: int = -1
    """Which one it is of those of a call of ``generate``; -1 for one that was submitted."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def left(self) -> int:
        """How many tokens are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> int:
        """How many log-probabilities of the prompt are still to come."""
        return 0 if self.sampling.prompt_logprobs is None else self.prompt - 1 - self.scored


@dataclass(frozen=True)
class Part:
    """What a step computes of one request: ``count`` tokens from ``start`` on."""

    request: Request
    start: int
    count: int
    chooses: bool
    """Whether the next token is chosen."""
    scores: int = 0
    """How many rows, from that of the token number ``request.scored`` on, give log-probabilities of the
    prompt.
    """


class Scheduler:
    """The requests that wait and run, and their pages.

    Args:
        pool: the pages.
        max_requests: how many run at a time; each has a seat.
        chunk: how many tokens a step has at most.
        max_length: how many tokens a request has at most.
    """

    def __init__(self, pool: PagePool, *, max_requests: int, chunk: int, max_length: int) -> None:
        self.pool, self.chunk, self.max_length = pool, chunk, max_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._seats = list(range(max_requests - 1, -1, -1))
        self.preempted = self.prefix_hits = self.prompt_tokens = self.output_tokens = self.finished = 0

    # ---- what comes ----

    def add(self, request: Request) -> None:
        """Let ``request`` wait for its turn."""
        self.waiting.append(request)

    def end(self, request: Request, finish: FinishReason, error: str | None = None) -> None:
        """Let ``request`` go, whatever it does now."""
        if request.finish is not None:
            return
        if request.seat >= 0:
            self._leave(request, forget=error is not None)
        else:
            self.waiting.remove(request)
        request.finish, request.error = finish, error
        self.finished += 1

    def start_again(self) -> None:
        """Compute everything again that is still needed: the weights have changed."""
        for request in reversed(self.running[:]):
            self._preempt(request)
        self.pool.forget_all()

    # ---- a step ----

    def plan(self) -> list[Part]:
        """What the next step computes."""
        parts: list[Part] = []
        budget, scored = self.chunk, MOST_SCORED
        planned: set[int] = set()
        preempted = self.preempted
        for request in sorted(self.running, key=lambda r: r.left > 1):
            if budget <= 0 or request.seat < 0:  # another one took its pages
                continue
            part = self._part(request, budget, scored)
            if part is None or not self._reserve(request, request.computed + part.count, planned):
                continue
            self._note_pages(part)
            parts.append(part)
            planned.add(request.serial)
            budget, scored = budget - part.count, scored - part.scores
        # who has just lost its pages would take them back
        while self.waiting and self._seats and budget > 0 and self.preempted == preempted:
            part = self._admit(self.waiting[0], budget, scored)
            if part is None:
                break
            self._note_pages(part)  # also for those that come next: a layer writes all pages, then reads
            parts.append(part)
            budget, scored = budget - part.count, scored - part.scores
        return parts

    def apply(self, parts: Sequence[Part], tokens: Sequence[int], bad: str) -> None:
        """Take the ``tokens`` that the step chose, one for each part that chooses; one below 0 says that the
        scores were ``bad``.
        """
        chosen = iter(tokens)
        for part in parts:
            request = part.request
            request.computed += part.count
            request.scored += part.scores
            self.prompt_tokens += part.count - (1 if part.start >= request.prompt else 0)
            if not part.chooses:
                continue
            token = next(chosen)
            if token < 0:
                self.end(request, "error", f"{bad} at position {len(request.tokens)}")
            elif request.sampling.max_tokens == 0:
                self.end(request, "length")
            else:
                self._append(request, token)

    # ---- steps that are started before the tokens of the last one are known ----

    @property
    def has_seat(self) -> bool:
        """Whether another request could run."""
        return bool(self._seats)

    def ends_with_next(self, request: Request) -> bool:
        """Whether ``request`` ends with its next token, whatever this is."""
        length = len(request.tokens) + 1
        return length - request.prompt >= request.sampling.max_tokens or length >= self.max_length

    def extend(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, int, int]] | None:
        """Give running requests pages for so many tokens, if there are enough pages for all.

        Returns the pages that are new: the serial of their request, their place among its pages, and they.
        """
        missing = [(r, self._missing(r, length)) for r, length in wanted]
        if sum(max(0, n) for _, n in missing) > self.pool.free:
            return None
        new = []
        for request, number in missing:
            for _ in range(number):
                page = self.pool.take()
                assert page is not None, "there are as many pages free as are missing"
                new.append((request.serial, len(request.pages), page))
                request.pages.append(page)
        return new

    def note(self, parts: Sequence[Part]) -> None:
        """Let others find the pages that ``parts``, which were not planned here, have filled."""
        for part in parts:
            if part.request.finish is None:
                self._note_pages(part)

    def _append(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.output_tokens += 1
        written = len(request.tokens) - request.prompt
        if token in request.ends:
            self.end(request, "stop")
        elif written >= request.sampling.max_tokens or len(request.tokens) >= self.max_length:
            self.end(request, "length")

    def _part(self, request: Request, budget: int, scored: int) -> Part | None:
        count = min(request.left, budget)
        wanted = 0
        if request.unscored:  # rows from `scored` on, of which the first may lie further on than `computed`
            skipped = max(0, request.scored - request.computed)
            count = min(count, scored + skipped)
            wanted = min(max(0, count - skipped), request.unscored)
        if count <= 0:
            return None
        return Part(request, request.computed, count, count == request.left, wanted)

    def _admit(self, request: Request, budget: int, scored: int) -> Part | None:
        """Give ``request`` a seat and pages for its first part, if there are enough."""
        if not request.unscored:  # what is not computed gives no scores
            request.pages = self.pool.find(request.tokens)
            request.computed = len(request.pages) * self.pool.page_size
            request.noted = len(request.pages)
        part = self._part(request, budget, scored)
        if part is None or self._missing(request, request.computed + part.count) > self.pool.free:
            self.pool.release(request.pages)
            request.pages, request.computed, request.noted = [], 0, 0
            return None
        self.waiting.popleft()
        self.prefix_hits += request.computed
        request.seat = self._seats.pop()
        self.running.append(request)
        self._reserve(request, request.computed + part.count, set())
        return part

    def _missing(self, request: Request, length: int) -> int:
        return -(-length // self.pool.page_size) - len(request.pages)

    def _reserve(self, request: Request, length: int, planned: set[int]) -> bool:
        """Give ``request`` pages for ``length`` tokens; others that are not ``planned`` may lose theirs."""
        while self._missing(request, length) > self.pool.free:
            others = (r for r in reversed(self.running) if r.serial not in planned and r is not request)
            victim = next(others, None)
            if victim is None:
                return False
            self._preempt(victim)
        for _ in range(self._missing(request, length)):
            page = self.pool.take()
            assert page is not None, "there are as many pages free as are missing"
            request.pages.append(page)
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.appendleft(request)
        self.preempted += 1

    def _leave(self, request: Request, *, forget: bool = False) -> None:
        self.pool.release(request.pages, forget=forget)
        self._seats.append(request.seat)
        self.running.remove(request)
        request.pages, request.computed, request.noted, request.seat = [], 0, 0, -1

    def _note_pages(self, part: Part) -> None:
        """Let others find the pages that are full after this step."""
        request, size = part.request, self.pool.page_size
        for i in range(request.noted, (part.start + part.count) // size):
            before = request.pages[i - 1] if i else None
            self.pool.note(request.pages[i], before, request.tokens[i * size : (i + 1) * size])
            request.noted = i + 1
