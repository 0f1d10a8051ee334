"""``Generator``: a model, whole or cut over ranks, writes text for many requests at once."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colossalai.inference.checks import check_model, check_module, check_request, check_sizes
from colossalai.inference.core import Core, Outcome
from colossalai.inference.gathered import GatheredModel
from colossalai.inference.messages import Kind, News, exchange
from colossalai.inference.prompts import Prompt, Prompts, as_tokens, digest, last_tokens, pairs
from colossalai.inference.requests import Completion, Event, GeneratorStats, Sampling, with_hints
from colossalai.inference.scheduler import Request
from colossalai.inference.stages import Team
from colossalai.inference.text import TextStream, encode
from colossalai.interface import user_module
from colossalai.mesh import Mesh, random_key
from colossalai.nn.modes import current
from colossalai.nn.policies.wrap_forward import WholeOutputs

_unseeded = itertools.count()  # requests of this process without a seed


class Generator:
    """A model that writes.  Every rank of a launched job makes one, on its part of the model.

    ``model`` is a causal language model of transformers or a ``GPT`` of titans, as it is or as
    ``parallelize``, ``split_model`` or ``boost`` returned it.  It is not copied, and between steps it is as
    it was: it may train and generate in turns.  Keys and values lie in pages, which requests share where they
    begin alike.

    The first rank of those that share a model takes requests (``submit``); all call ``step``, or the others
    :meth:`follow`.  ``generate``, ``stream`` and ``score`` are called by all of them.  Ranks that differ in
    their data have different requests.

    Under FSDP and Gemini weights are brought together for the time of a call of ``generate``, ``stream`` or
    ``score``, and of this constructor; then all ranks of the job call these together.

    Args:
        tokenizer: with ``encode`` and ``decode``, for prompts and outputs that are text.
        max_requests: how many requests run at a time; more wait.
        max_length: how many tokens a request may have with its prompt, by default as many as the model has
            positions.
        page_size: how many tokens a page has.
        pages: how many pages there are, by default as many as ``max_requests`` of the longest need, or as
            ``memory`` has room for.
        memory: the share of the device's free memory that pages may take, by default 0.8 on a GPU, and 0.25
            of the host's memory on a CPU.
        chunk: how many tokens a step computes at most, by default 2048, and 8192 on a GPU; longer
            prompts take several steps.
        prefix_reuse: whether a request takes up the pages of an earlier one that begins alike.
        exact: whether results must not depend on the other requests, bit for bit.
        mesh: that on which the model was cut, by default that of the launched job.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_requests: int = 64,
        max_length: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        memory: float | None = None,
        chunk: int | None = None,
        prefix_reuse: bool = True,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        check_module(model)
        if chunk is None:
            chunk = 8192 if next(model.parameters()).is_cuda else 2048
        check_sizes(
            max_requests=max_requests, max_length=max_length, page_size=page_size, pages=pages, chunk=chunk
        )
        if memory is not None and not 0 < memory <= 1:
            raise ValueError(f"Generator(memory={memory!r}): it is a share of the free memory, above 0 to 1")
        self._gathered = GatheredModel.of(model)
        self.model: nn.Module = user_module(model) if self._gathered is None else self._gathered.module
        if mesh is None:
            mesh = self.model.cut_as[1] if isinstance(self.model, WholeOutputs) else current().mesh
        check_model(self.model, mesh)
        self.tokenizer = tokenizer
        self.team = Team(mesh, next(self.model.parameters()).device)
        with self._whole_weights():
            self.core = Core(
                self.model,
                self.team,
                max_requests=max_requests,
                max_length=max_length,
                page_size=page_size,
                pages=pages,
                memory=memory,
                chunk=chunk,
                prefix_reuse=prefix_reuse,
                exact=exact,
                stays=self._gathered is None,
            )
        self._serials = itertools.count()
        self._arriving: deque[tuple[Hashable, Request]] = deque()
        self._leaving: deque[Hashable] = deque()
        self._stopped: list[int] = []  # at a stop string, which only the first rank sees
        self._serial_of: dict[Hashable, int] = {}
        self._uids: dict[int, Hashable] = {}
        self._texts: dict[int, TextStream] = {}
        self._undelivered: list[Event] = []  # until step, or the call that asked for the request, takes them
        self._called: set[Hashable] = set()  # requests of calls of generate and stream
        self._closed = False
        self._turn = threading.RLock()  # threads that call generate or stream take turns step by step

    # ---- requests, on the first rank ----

    @with_hints
    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),  # noqa: B008
        *,
        uid: Hashable | None = None,
    ) -> Hashable:
        """Let a request wait for the next step, and return its ``uid``; another thread may call this."""
        self._check_first()
        self._check_open()
        self._check_whole()
        if uid is not None and uid in self._serial_of:
            raise ValueError(f"a request {uid!r} is on its way already; give each its own uid")
        return self._enqueue(self._request(prompt, sampling), uid)

    def _enqueue(self, request: Request, uid: Hashable | None = None) -> Hashable:
        request.serial = next(self._serials)
        uid = f"request {request.serial}" if uid is None else uid
        self._serial_of[uid] = request.serial
        self._arriving.append((uid, request))
        return uid

    def cancel(self, uid: Hashable) -> None:
        """End a request in the next step; one that has ended, or never was, is left alone."""
        self._check_first()
        self._leaving.append(uid)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        ours = self._arriving or self._leaving or self._stopped
        undelivered = any(event.uid not in self._called for event in self._undelivered)
        return not (ours or undelivered or self.core.busy)

    def stats(self) -> GeneratorStats:
        """What this generator holds, and what it has done."""
        found = self.core.stats()
        return replace(found, waiting=found.waiting + len(self._arriving))

    def _request(self, prompt: Prompt, sampling: Sampling, place: int = -1) -> Request:
        tokens = encode(self.tokenizer, prompt) if isinstance(prompt, str) else as_tokens(prompt)
        core = self.core
        check_request(tokens, sampling, model=self.model, max_length=core.max_length, capacity=core.capacity)
        if sampling.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={sampling.stop!r} are strings, and this Generator has no tokenizer; give it one, or"
                " stop_tokens"
            )
        ends = frozenset(sampling.stop_tokens) | (
            frozenset() if sampling.ignore_eos else last_tokens(self.model)
        )
        return Request(-1, tokens, sampling, ends, place=place)

    def _seeded(self, request: Request) -> Request:
        if request.sampling.seed is None and not request.sampling.greedy:
            seed = random_key(torch.initial_seed(), "generate", next(_unseeded), self.team.replica) >> 1
            request.sampling = replace(request.sampling, seed=seed)
        return request

    # ---- steps ----

    def step(self) -> list[Event]:
        """Do one step, with all ranks that share the model; returns what requests got, on the first rank.

        An event has at least a token, or says how its request ended.
        """
        with self._turn:
            self._advance()
            return self._collect([event.uid for event in self._undelivered if event.uid not in self._called])

    def follow(self) -> None:
        """Take part in the steps of the first rank until it calls :meth:`close`."""
        if self.team.is_first:
            raise RuntimeError("the first rank leads: it calls step(); the others call follow()")
        while not self._closed:
            self._take(self._exchange(None))

    def close(self) -> None:
        """Let go of the pages, on all ranks that share the model, which call this or follow; the model stays
        as it is.
        """
        if self.team.is_first and not self._closed:
            self._exchange(News(Kind.CLOSE))
            self._end()
        elif not self._closed:
            self.follow()

    def _end(self) -> None:
        self._closed = True
        self.core.close()

    def _whole_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self._gathered is None else self._gathered.whole()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Generator is closed; make another one of the model")

    def _check_whole(self) -> None:
        if self._gathered is not None and not self._gathered.is_whole:
            raise RuntimeError(
                f"the weights of this {type(self.model).__name__} lie in pieces (FSDP) or chunks (Gemini);"
                " they are whole for the time of a call of generate, stream or score, which all ranks make"
                " together: use these"
            )

    def _check_first(self) -> None:
        if not self.team.is_first:
            raise RuntimeError(
                "requests are submitted and cancelled on the first rank of those that share a model; this one"
                " calls follow() or step(), or all of them call generate()"
            )

    def _exchange(self, news: News | None) -> News:
        whole = self._gathered is None or self._gathered.is_whole
        return exchange(self.team, news, again=whole and self.core.weights_changed())

    def _advance(self) -> None:
        """Do one step, and keep its events."""
        self._check_open()
        self._check_whole()
        self._undelivered += self._take(self._exchange(self._news() if self.team.is_first else None))

    def _collect(self, uids: Collection[Hashable]) -> list[Event]:
        """The events of requests that have come, which are delivered with this."""
        events, self._undelivered = self._undelivered, []
        self._undelivered = [event for event in events if event.uid not in uids]
        return [event for event in events if event.uid in uids]

    def _news(self) -> News:
        """What came since the last step."""
        news = News(ended=[(serial, "stop") for serial in self._stopped])
        self._stopped.clear()
        # before arrivals: whoever is cancelled from another thread in between has arrived then
        leaving = [self._leaving.popleft() for _ in range(len(self._leaving))]
        while self._arriving:
            uid, request = self._arriving.popleft()
            self._uids[request.serial] = uid
            if self.tokenizer is not None:
                stop = request.sampling.stop
                self._texts[request.serial] = TextStream(self.tokenizer, request.tokens, stop)
            news.arrivals.append(self._seeded(request))
        cancelled = {self._serial_of.get(uid): None for uid in leaving}
        cancelled.pop(None, None)
        news.ended += [(serial, "cancelled") for serial in cancelled if serial is not None]
        return news

    def _take(self, news: News) -> list[Event]:
        """Do what ``news`` say; returns the events of a step, on the first rank."""
        if news.kind is Kind.COMPARE:
            self._agree(news.digest, news.digest)
        elif news.kind is Kind.CLOSE:
            self._end()
        if news.kind is not Kind.STEP:
            return []
        outcomes = self.core.step(news)
        return [self._event(outcome) for outcome in outcomes] if self.team.is_first else []

    def _event(self, outcome: Outcome) -> Event:
        request = outcome.request
        event = Event(
            self._uids[request.serial],
            outcome.tokens,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            finish_reason=request.finish,
            error=request.error,
        )
        text = self._texts.get(request.serial)
        if text is not None:
            shown = [t for t in outcome.tokens if t not in request.ends]
            event.text = text.add(shown, last=request.finish is not None)
            if text.stopped and request.finish in (None, "length"):
                if request.finish is None:
                    self._stopped.append(request.serial)
                event.finish_reason = "stop"
        if event.finish_reason is not None:
            self._forget(request.serial)
        return event

    def _forget(self, serial: int) -> None:
        uid = self._uids.pop(serial)
        self._serial_of.pop(uid, None)
        self._texts.pop(serial, None)

    # ---- whole calls, on all ranks ----

    @with_hints
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008
    ) -> list[Completion]:
        """Write for all ``prompts``, with one ``sampling`` or one for each, and return what was written.

        What a tokenizer returns (``input_ids`` with ``attention_mask``) is taken too, without its padding.
        All ranks that share the model call this with the same prompts, and get the same.  A prompt that
        cannot be served is an error for all of them, and nothing is written.
        """
        self._check_open()
        asked = pairs(prompts, sampling, self.model, self.tokenizer)
        requests = [self._request(prompt, own, i) for i, (prompt, own) in enumerate(asked)]
        self._compare(requests)
        with self._whole_weights():
            return self._generate(requests) if self.team.is_first else self._follow_call(requests)

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        done: dict[Hashable, Completion] = {}
        for request in requests:
            uid = self._enqueue(request)
            done[uid] = Completion(uid, list(request.tokens))
        with self._call(done) as left:
            while left:
                for event in self._events_of(done):
                    done[event.uid].add(event)
                    left -= {event.uid} if event.finish_reason is not None else set()
        return list(done.values())

    @with_hints
    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),  # noqa: B008
    ) -> Iterator[Event]:
        """Write for one ``prompt``, and yield what comes with every step; all ranks walk through it.

        On the other ranks it yields nothing, and is over when the first rank's is.
        """
        self._check_open()
        request = self._request(prompt, sampling, 0)
        self._compare([request])
        with self._whole_weights():
            if self.team.is_first:
                yield from self._stream(request)
            else:
                self._follow_call([request])

    def _stream(self, request: Request) -> Iterator[Event]:
        uid = self._enqueue(request)
        with self._call([uid]) as left:
            while left:
                for event in self._events_of([uid]):
                    left -= {uid} if event.finish_reason is not None else set()
                    yield event

    @with_hints
    def score(self, sequences: Sequence[Prompt]) -> list[list[float]]:
        """The log-probability of each token of each sequence after its first, by the model."""
        sampling = Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        found = self.generate(sequences, sampling)
        wrong = next((f"sequence {i}: {c.error}" for i, c in enumerate(found) if c.error), None)
        if wrong is not None:
            raise ValueError(wrong)
        return [[t.logprob for t in completion.prompt_logprobs or ()] for completion in found]

    def _compare(self, requests: Sequence[Request]) -> None:
        """Refuse a call for which the ranks were given different requests."""
        if self.team.size == 1:
            return
        own = digest(requests)
        if self.team.is_first:
            self._exchange(News(Kind.COMPARE, digest=own))
            self._agree(own, own)
            return
        news = self._exchange(None)
        if news.kind is not Kind.COMPARE:
            raise RuntimeError("this rank calls generate, and the first one something else")
        self._agree(own, news.digest)

    def _agree(self, own: int, digest: int) -> None:
        if not self.team.least(int(own == digest)):
            raise ValueError(
                "the ranks that share a model were given different prompts or samplings; give all of them the"
                " same, or different ones to ranks that differ in their data (parallel.data). Where all ranks"
                " walk through a stream, the next call begins when it has ended, or was closed"
            )

    def _follow_call(self, requests: Sequence[Request]) -> list[Completion]:
        """Take part in a call of the first rank; returns what it wrote."""
        written: dict[int, Completion] = {}
        streams: dict[int, TextStream] = {}
        while (news := self._exchange(None)).kind is not Kind.END:
            if news.kind is Kind.COMPARE:  # a call inside of this one, which this rank cannot make
                self.team.least(0)
                continue
            if news.kind is Kind.CLOSE:
                self._end()
                break
            for request in news.arrivals:
                if request.place < 0:  # submitted on the first rank before this call
                    continue
                stop = requests[request.place].sampling.stop
                written[request.serial] = Completion(f"request {request.serial}", list(request.tokens))
                streams[request.serial] = TextStream(self.tokenizer, request.tokens, stop)
            for outcome in self.core.step(news):
                request = outcome.request
                if request.serial not in written:
                    continue
                text = streams[request.serial]
                stopped = text.stopped
                event = Event(
                    None,
                    [] if stopped else outcome.tokens,
                    logprobs=outcome.logprobs,
                    prompt_logprobs=outcome.prompt_logprobs,
                    finish_reason=request.finish,
                    error=request.error,
                )
                shown = [t for t in outcome.tokens if t not in request.ends]
                event.text = text.add(shown, last=request.finish is not None)
                if text.stopped and event.finish_reason in (None, "length"):
                    event.finish_reason = "stop"
                written[request.serial].add(event)
        return list(written.values())

    @contextmanager
    def _call(self, uids: Collection[Hashable]) -> Iterator[set[Hashable]]:
        """A call that takes the events of ``uids``; it yields those that have not ended, to be kept so."""
        left = set(uids)
        with self._turn:
            self._called |= left
        try:
            yield left
        finally:
            with self._turn:
                self._leaving += left
                try:  # pages before the others leave
                    while (self._stopped or self._leaving) and not self._closed:
                        self._advance()
                finally:
                    self._collect(uids)
                    self._called -= set(uids)
                if self.team.size > 1 and not self._closed:
                    self._exchange(News(Kind.END))

    def _events_of(self, uids: Collection[Hashable]) -> list[Event]:
        """The events of ``uids``: those that came in steps of others' calls, or else those of a step."""
        with self._turn:
            found = self._collect(uids)
            if not found:
                self._advance()
                found = self._collect(uids)
            return found
