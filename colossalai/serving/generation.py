"""The program of ranks that generate: a ``Generator`` on each, of which the first takes the requests."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from colossalai.inference import Event, Sampling
from colossalai.serving.worker import BEAT, EVENTS, STOP, ServiceLink

HEARTBEAT = 5.0
"""Seconds after which an idle generator makes an empty step: ranks that follow wait in a collective, which
has a timeout, and one that is gone is noticed.
"""
_BEAT_EVERY = 0.5
INVALID = "invalid"


class Generation:
    """Take requests into a generator, step it while it has work, and send what each step gave."""

    def __init__(self, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._generator = build(**options)
        self._told = 0.0

    def run(self, link: ServiceLink) -> None:
        if link.rank != 0:
            self._generator.follow()
            return
        while self._take(link):
            events = self._generator.step()
            if events:
                # one text: the frame's own search for tensors would cost more than a step of a small model
                link.send(EVENTS, json.dumps([_as_data(event) for event in events]))
            if (now := time.monotonic()) - self._told >= _BEAT_EVERY or self._generator.idle:
                self._told = now
                link.send(BEAT, dataclasses.asdict(self._generator.stats()))

    def _take(self, link: ServiceLink) -> bool:
        """All orders that have come; False at the end."""
        for kind, value in link.take(HEARTBEAT if self._generator.idle else 0.0):
            if kind == STOP:
                self._generator.close()
                return False
            if kind == "generate":
                self._submit(link, *value)
            elif kind == "cancel":
                self._generator.cancel(value)
        return True

    def _submit(self, link: ServiceLink, uid: int, request: dict[str, Any]) -> None:
        try:
            self._generator.submit(request["prompt"], Sampling(**request["sampling"]), uid=uid)
        except (ValueError, TypeError) as error:
            link.send(EVENTS, [[uid, {"error": str(error), "kind": INVALID}, True]])


def _as_data(event: Event) -> list[Any]:
    """An event as plain values; what is None is left out."""
    data: dict[str, Any] = {"tokens": event.tokens, "text": event.text}
    for name in ("logprobs", "prompt_logprobs"):
        found = getattr(event, name)
        if found is not None:
            data[name] = [[one.token, one.logprob, [list(pair) for pair in one.top]] for one in found]
    if event.finish_reason is not None:
        data["finish_reason"] = event.finish_reason
    if event.error is not None:
        data["error"] = event.error
    return [event.uid, data, event.finish_reason is not None]
