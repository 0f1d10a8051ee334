"""Requests come, write, are cancelled and lose their pages, and no page is lost or shared by mistake."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from colossalai.inference import Sampling
from colossalai.inference.pages import PagePool
from colossalai.inference.scheduler import Request, Scheduler

PAGE = 4


def scheduler(pages: int, *, seats: int = 8, chunk: int = 16, length: int = 64) -> Scheduler:
    return Scheduler(PagePool(pages, PAGE), max_requests=seats, chunk=chunk, max_length=length)


def check(s: Scheduler, shadow: dict[int, list[int]]) -> None:
    """Pages are held by those who name them, and a request reads what it would have written itself."""
    held = Counter(page for request in s.running for page in request.pages)
    assert {p: n for p, n in enumerate(s.pool._holders) if n} == dict(held)
    assert s.pool.free + len(held) == s.pool.count
    for request in s.running:
        for place in range(request.computed):
            page = request.pages[place // PAGE]
            assert shadow[page][place % PAGE] == hash(tuple(request.tokens[: place + 1]))


def compute(s: Scheduler, shadow: dict[int, list[int]], numbers: random.Random) -> None:
    """One step of a model whose keys tell all that a token has seen."""
    parts = s.plan()
    assert sum(part.count for part in parts) <= s.chunk
    assert len({part.request.serial for part in parts}) == len(parts)
    for part in parts:
        assert part.request.computed == part.start
        for place in range(part.start, part.start + part.count):
            page = part.request.pages[place // PAGE]
            shadow[page][place % PAGE] = hash(tuple(part.request.tokens[: place + 1]))
    chosen = [
        numbers.choice((-1, *range(1, 40))) if numbers.random() < 0.02 else 1 for p in parts if p.chooses
    ]
    tokens = [token if token < 0 else numbers.randrange(3) for token in chosen]
    s.apply(parts, tokens, "nan")


@pytest.mark.parametrize(("pages", "seats"), [(17, 4), (40, 8), (300, 32)])
def test_ten_thousand_requests_leave_no_page_behind(pages: int, seats: int) -> None:
    numbers = random.Random(pages)
    s = scheduler(pages, seats=seats, chunk=4 * seats)
    shadow = {page: [0] * PAGE for page in range(pages)}
    alive: dict[int, Request] = {}
    serial, total, finishes = 0, 3400, Counter[str]()
    while serial < total or alive:
        for _ in range(numbers.randrange(6) if serial < total else 0):
            tokens = [numbers.randrange(2) for _ in range(numbers.randrange(1, 40))]
            sampling = Sampling(
                max_tokens=numbers.randrange(12), prompt_logprobs=0 if numbers.random() < 0.1 else None
            )
            alive[serial] = Request(serial, tokens, sampling, frozenset({2}))
            s.add(alive[serial])
            serial += 1
        if alive and numbers.random() < 0.2:
            s.end(alive[numbers.choice(list(alive))], "cancelled")
        if numbers.random() < 0.01:
            s.start_again()
        compute(s, shadow, numbers)
        if serial % 7 == 0:
            check(s, shadow)
        for request in [r for r in alive.values() if r.finish is not None]:
            finishes[alive.pop(request.serial).finish] += 1
    assert sum(finishes.values()) == s.finished == serial >= total
    assert set(finishes) == {"stop", "length", "cancelled", "error"}
    assert s.pool.free == pages
    assert not s.running
    assert not s.waiting
    assert s.prefix_hits > 0
    assert s.preempted > 0
    assert len(s._seats) == seats


def test_two_schedulers_decide_alike() -> None:
    def run() -> list[object]:
        numbers, s, seen = random.Random(5), scheduler(20), []
        for serial in range(60):
            tokens = [numbers.randrange(3) for _ in range(numbers.randrange(1, 30))]
            s.add(Request(serial, tokens, Sampling(max_tokens=6), frozenset()))
        while s.waiting or s.running:
            parts = s.plan()
            seen.append([(p.request.serial, p.start, p.count, tuple(p.request.pages)) for p in parts])
            s.apply(parts, [numbers.randrange(3) for p in parts if p.chooses], "")
        return seen

    assert run() == run()


def test_pages_are_found_again_by_all_that_came_before() -> None:
    pool = PagePool(6, 2)
    first = [pool.take() for _ in range(2)]
    pool.note(first[0], None, [1, 2])
    pool.note(first[1], first[0], [3, 4])
    assert pool.find([1, 2, 3, 4]) == first[:1], "the last token is computed, for its scores"
    assert pool.find([1, 2, 3, 4, 5]) == first
    assert pool.find([9, 9, 3, 4, 5]) == []
    for pages in (first, first[:1], first):
        pool.release(pages)
    assert pool.free == 6
    assert pool.find([1, 2, 3, 4, 5]) == first, "contents rest until their page is needed"
    pool.release(first)
    taken = [pool.take() for _ in range(6)]
    assert sorted(taken) == list(range(6))
    assert pool.take() is None
    assert taken[-2:] == [first[1], first[0]], "what was used last goes last, the end of a text first"
    assert pool.find([1, 2, 3, 4, 5]) == []


def test_nothing_is_found_after_the_weights_have_changed() -> None:
    pool = PagePool(2, 2)
    page = pool.take()
    pool.note(page, None, [1, 2])
    pool.release([page])
    pool.forget_all()
    assert pool.find([1, 2, 3]) == []
    assert pool.free == 2


def test_one_that_writes_does_not_wait_for_long_prompts() -> None:
    s = scheduler(64, chunk=8)
    s.add(Request(0, [1] * 3, Sampling(max_tokens=9), frozenset()))
    s.apply(s.plan(), [1], "")
    s.add(Request(1, [2] * 40, Sampling(max_tokens=9), frozenset()))
    for _ in range(4):
        parts = s.plan()
        assert [(p.request.serial, p.count) for p in parts] == [(0, 1), (1, 7)]
        s.apply(parts, [1] * sum(p.chooses for p in parts), "")
