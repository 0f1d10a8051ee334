"""The steps of a generator, alike on all ranks: what is planned, computed, chosen and sent to all."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.inference.checks import NO_HEAD
from colossalai.inference.decode_loop import DecodeLoop, Flight
from colossalai.inference.discovery import Asked
from colossalai.inference.inputs import StepInputs
from colossalai.inference.messages import News
from colossalai.inference.pages import PagePool
from colossalai.inference.requests import GeneratorStats, Sampling, TokenLogprobs
from colossalai.inference.results import Results
from colossalai.inference.runner import Runner, head_of, largest_difference, vocabulary_of
from colossalai.inference.sampling import SamplingRows, choose
from colossalai.inference.scheduler import Part, Request, Scheduler
from colossalai.inference.stages import Team
from colossalai.inference.watch import ModelWatch
from colossalai.nn.exact import exact_mode
from colossalai.nn.policies.sequences.probe import Refused

_BAD = "the model gave scores that are no finite numbers (nan or infinite)"
_TRIAL = 8
"""The most tokens of a trial."""


@dataclass
class Outcome:
    """What a step gave one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Core:
    """Requests, pages and the model of this rank; see ``Generator`` for the arguments.

    ``stays`` says whether the weights lie where they are between calls, so that a step may be under way then.
    """

    def __init__(
        self,
        model: nn.Module,
        team: Team,
        *,
        max_requests: int,
        max_length: int | None,
        page_size: int,
        pages: int | None,
        memory: float | None,
        chunk: int,
        prefix_reuse: bool,
        exact: bool,
        stays: bool = True,
    ) -> None:
        self.model, self.team = model, team
        self._exact = exact
        kind = team.device.type
        # pages and graphs have the precision of now, so every step has it
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.max_length = _longest(model, max_length)
        self._watch = ModelWatch(model)
        self.runner = Runner(model, team, self._watch)
        self._vocabulary = vocabulary_of(model) or 0
        self._trial = _trial_tokens(self._vocabulary, min(_TRIAL, self.max_length)).to(team.device)
        asked = self._discover()
        wanted = max_requests * -(-self.max_length // page_size)
        count = pages or team.least(min(wanted, _room(asked, page_size, memory, team.device)))
        self.capacity = count * page_size
        if self.capacity < 2:
            raise ValueError(
                f"Generator: {count} pages of {page_size} tokens have no room for a request of one token and"
                " what follows it; give it more pages= or memory="
            )
        self.runner.allocate(asked, count, page_size, exact=exact)
        self.pool = PagePool(count, page_size, reuse=prefix_reuse)
        self.scheduler = Scheduler(
            self.pool, max_requests=max_requests, chunk=chunk, max_length=self.max_length
        )
        self.inputs = StepInputs(
            team.device,
            max_requests=max(max_requests, 2),
            chunk=max(chunk, 2 * _TRIAL),
            max_pages=-(-self.max_length // page_size),
        )
        self._max_requests = max_requests
        self._requests: dict[int, Request] = {}
        self._of_prompts: dict[int, list[TokenLogprobs]] = {}
        self._rows: tuple[tuple[int, ...], SamplingRows] | None = None
        self._steps = 0
        self._again = False  # whether what lies in pages may be of other weights, or was never computed
        self._flight: Flight | None = None
        ahead = team.size == 1 and team.device.type == "cuda" and stays
        self._loop = self._make_loop(exact) if ahead else None
        self._verify()
        if self._loop is not None:
            with self._mode():
                self._loop.prepare()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """How a step computes."""
        enabled, dtype = self._autocast
        # copies of weights that autocast keeps would be those of older weights, or lie in a graph
        cast = torch.autocast(self.team.device.type, dtype, enabled, cache_enabled=False)
        with cast, exact_mode() if self._exact else nullcontext():
            yield

    def _make_loop(self, exact: bool, *, record: bool = True) -> DecodeLoop:
        return DecodeLoop(
            self.runner,
            self.scheduler,
            self._watch,
            self.team.device,
            max_requests=self._max_requests,
            max_pages=-(-self.max_length // self.pool.page_size),
            exact=exact,
            record=record,
        )

    # ---- trials ----

    def _discover(self) -> dict[nn.Module, Asked]:
        """What the model asks of attention; refuses what pages do not have, on all ranks."""
        problem, asked = "", {}
        try:
            asked = self.runner.discover(self._trial[None, : max(2, len(self._trial) // 2)])
        except Refused as refusal:
            problem = str(refusal)
        except RuntimeError as error:  # code that computes with the mask, which has no values here
            reason = str(error).splitlines()[0]
            problem = (
                "its attention does not go through transformers' AttentionInterface: its own code stopped at"
                f" a mask of ours ({reason})"
            )
        if not asked and not problem:
            problem = "none of its attention goes through transformers' AttentionInterface, or is known here"
        words = problem and f"cannot generate here, as {problem}"
        if self.team.is_last_stage and head_of(self.model) is None:
            words = NO_HEAD
        self._raise_together(words and f"{type(self.model).__name__} {words}")
        return asked

    def _verify(self) -> None:
        """Refuse a model that gives other scores when its tokens are packed and its keys lie in pages."""
        texts = self._trial_texts()
        expected = [self.runner.alone(text[None]) for text in texts]
        requests = [Request(-1, text.tolist(), Sampling(), frozenset()) for text in texts]
        size = self.pool.page_size
        for request in requests:
            request.pages = [self.pool.take() or 0 for _ in range(-(-len(request.tokens) // size))]
        cuts = [max(1, len(texts[0]) // 2), *(len(text) - 1 for text in texts[1:])]
        found: list[Any] = []
        for step in range(2):  # the beginnings, then what is left: more than one token, and one
            parts = [
                Part(r, cut if step else 0, len(r.tokens) - cut if step else cut, True)
                for r, cut in zip(requests, cuts, strict=True)
                if step == 0 or len(r.tokens) > cut
            ]
            self.inputs.fill(parts, size)
            found.append(self.runner.step(self.inputs))
        for request in requests:
            self.pool.release(request.pages)
        problem = _compare(found, expected, cuts) if self.team.is_last_stage else ""
        self._raise_together(problem and f"{type(self.model).__name__} cannot generate here: {problem}")

    def _trial_texts(self) -> list[Tensor]:
        """Texts for which there are pages: two if possible, else one."""
        both, size = [self._trial, self._trial.flip(0)[:-1]], self.pool.page_size
        if len(both[1]) > 1 and sum(-(-len(text) // size) for text in both) <= self.pool.count:
            return both
        return [both[0][: self.capacity]]

    def _raise_together(self, problem: str) -> None:
        if not self.team.least(int(not problem)):
            raise ValueError(problem or "another rank of this model cannot generate; it says why")

    # ---- steps ----

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def weights_changed(self) -> bool:
        """Whether the model may compute something else than in the last step, so that pages have no use."""
        self._again |= self._watch.look(idle=not self.busy)
        return self._again

    def step(self, news: News) -> list[Outcome]:
        """One step after ``news``."""
        self._again = True  # unless it ends well: pages count as filled as soon as that is planned
        with self._mode():
            outcomes = self._step(news)
        self._again = False
        return outcomes

    def _step(self, news: News) -> list[Outcome]:
        outcomes: list[Outcome] = []
        landed: list[Outcome] = []
        for request in news.arrivals:
            self._requests[request.serial] = request
            self.scheduler.add(request)
        for serial, finish in news.ended:
            if serial in self._requests:
                request = self._requests.pop(serial)
                self._of_prompts.pop(serial, None)
                self.scheduler.end(request, finish)
                if finish == "cancelled":  # of one that stopped, all was said
                    outcomes.append(Outcome(request))
        if self._loop is not None and self._flight is not None:
            flight, self._flight = self._flight, None
            if not news.again:
                self._flight = self._loop.ahead(flight)
            landed = self._land(flight)
            outcomes += landed
        if news.again:
            self.scheduler.start_again()
        # a request has one outcome of a step, so that a stop string in it is seen before more is written
        if self._flight is None and not landed:
            parts = self.scheduler.plan()
            if parts and self._loop is not None and self._loop.takes(parts):
                self._flight = self._loop.begin(parts)
            elif parts:
                outcomes += self._compute(parts)
        self._steps += 1
        return outcomes

    def _land(self, flight: Flight) -> list[Outcome]:
        """Take what a step gave that was started before; of requests that ended since, nothing."""
        found = flight.wait()
        tokens = flight.results.tokens(found)
        left = [(p, t) for p, t in zip(flight.parts, tokens, strict=True) if p.request.finish is None]
        outcomes = self._take([part for part, _ in left], flight.results, found, [token for _, token in left])
        self.scheduler.note([part for part, _ in left])
        return outcomes

    def _compute(self, parts: Sequence[Part]) -> list[Outcome]:
        self.inputs.fill(parts, self.pool.page_size)
        scores = self.runner.step(self.inputs)
        results = Results(parts)
        numbers = None if scores is None else results.pack(scores, *self._choose(parts, scores))
        found = self.team.from_last(
            torch.zeros(results.length, dtype=torch.int64) if numbers is None else numbers.cpu()
        )
        return self._take(parts, results, found, results.tokens(found))

    def _take(
        self, parts: Sequence[Part], results: Results, found: Tensor, tokens: Sequence[int]
    ) -> list[Outcome]:
        """Let requests have their ``tokens``, and the log-probabilities that were ``found`` with them."""
        before = [len(part.request.tokens) for part in parts]
        self.scheduler.apply(parts, tokens, _BAD)
        outcomes = []
        for part, length in zip(parts, before, strict=True):
            request = part.request
            own, ofprompt = results.logprobs(part, found)
            new = request.tokens[length:]
            if ofprompt is not None and any(math.isnan(t.logprob) for t in ofprompt):
                self.scheduler.end(request, "error", f"{_BAD} in the prompt")
            if ofprompt is not None:
                self._of_prompts.setdefault(request.serial, []).extend(ofprompt)
            if new or request.finish is not None:
                ofprompt = self._of_prompts.pop(request.serial, None)
                outcomes.append(Outcome(request, new, own if new else None, ofprompt))
            if request.finish is not None:
                self._requests.pop(request.serial, None)
        return outcomes

    def _choose(self, parts: Sequence[Part], scores: Tensor) -> tuple[Tensor]:
        """The tokens that the step chooses."""
        chosen = [part.request for part in parts if part.chooses]
        serials = tuple(request.serial for request in chosen)
        if self._rows is None or self._rows[0] != serials:
            self._rows = (
                serials,
                SamplingRows.of([r.sampling for r in chosen], scores.shape[-1], scores.device),
            )
        rows = self._rows[1]
        logits = scores[: len(chosen)]
        positions = torch.tensor([len(request.tokens) for request in chosen], device=scores.device)
        seen = None if rows.penalty is None else self._seen_tokens(chosen, scores)
        return (choose(logits, rows, positions, seen),)

    def _seen_tokens(self, chosen: Sequence[Request], scores: Tensor) -> Tensor:
        """Which tokens each text has, where that counts."""
        seen = torch.zeros(len(chosen), scores.shape[-1], dtype=torch.bool, device=scores.device)
        for row, request in enumerate(chosen):
            if request.sampling.repetition_penalty != 1.0:
                seen[row, torch.tensor(request.tokens, device=scores.device)] = True
        return seen

    def stats(self) -> GeneratorStats:
        """Counts of what is held and was done."""
        scheduler = self.scheduler
        return GeneratorStats(
            pages_used=self.pool.count - self.pool.free,
            pages_free=self.pool.free,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preempted=scheduler.preempted,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            steps=self._steps,
            finished=scheduler.finished,
        )

    def close(self) -> None:
        """Let go of the pages."""
        self._flight = None
        if self._loop is not None:
            self._loop.close()
        self.runner.layers.clear()


def _longest(model: Any, asked: int | None) -> int:
    """How many tokens a text may have."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    known = [
        getattr(holder, name, None)
        for holder, name in ((text, "max_position_embeddings"), (model, "max_position_embeddings"))
    ]
    most = next((n for n in known if isinstance(n, int) and n > 0), None)
    if asked is not None and most is not None and asked > most:
        raise ValueError(
            f"Generator(max_length={asked}): the model has {most} positions (max_position_embeddings)"
        )
    return asked or most or 2048


def _trial_tokens(vocabulary: int, length: int) -> Tensor:
    numbers = torch.Generator().manual_seed(4321)
    return torch.randint(max(2, min(vocabulary or 100, 100)), (length,), generator=numbers)


def _room(asked: dict[nn.Module, Asked], page_size: int, memory: float | None, device: torch.device) -> int:
    """For how many pages this rank has memory."""
    per_page = page_size * sum(form.bytes_per_token() for form in asked.values())
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        share = 0.8 if memory is None else memory
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = 0.25 if memory is None else memory
    return int(free * share) // max(1, per_page)


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor | None], cuts: Sequence[int]) -> str:
    """What is wrong with the scores of a trial, in words."""
    whole = [scores for scores in expected if scores is not None]
    right = [scores[cut - 1] for scores, cut in zip(whole, cuts, strict=True)]
    right += [scores[-1] for scores, cut in zip(whole, cuts, strict=True) if len(scores) > cut]
    if not all(bool(row.isfinite().all()) for row in right):
        return f"{_BAD}, also with its own attention; its weights may be so"
    off = largest_difference([row for rows in found for row in rows], right)
    most = {torch.float64: 1e-6, torch.float32: 1e-3}.get(whole[0].dtype, 0.25)
    if off <= most:
        return ""
    return (
        f"with its keys and values in pages its scores are off by {off:.1e}, so its code mixes tokens outside"
        " of attention, or counts positions in a way of its own"
    )
