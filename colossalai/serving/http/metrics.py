"""Numbers for Prometheus.  Labels come from closed lists, so no client can make them grow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colossalai.serving.service import Service

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, service: Service | None = None) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry, "namespace": "colossalai"}
        self.requests = Counter(
            "http_requests", "HTTP requests that were answered.", ["route", "status"], **make
        )
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of accepted prompts.", **make)
        self.output_tokens = Counter("output_tokens", "Tokens that were generated.", **make)
        self.finished = Counter("finished", "Generations by their end.", ["reason"], **make)
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **make
        )
        self.per_token = Histogram(
            "time_per_output_token_seconds",
            "Mean of a request, after its first token.",
            buckets=_TOKEN_SECONDS,
            **make,
        )
        self.duration = Histogram(
            "request_seconds", "From a request to its last token.", buckets=_SECONDS, **make
        )
        self.in_flight = Gauge("requests_in_flight", "Generations that are waiting or running.", **make)
        if service is not None:
            self.registry.register(_OfService(service))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _OfService(Collector):
    """What the service and its generator say of themselves, read when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        yield GaugeMetricFamily("colossalai_up", "1 if the ranks are ready.", float(service.state == "ready"))
        yield GaugeMetricFamily(
            "colossalai_restarts", "Starts of the ranks after a failure.", service.restarted
        )
        yield GaugeMetricFamily("colossalai_pending", "Requests that wait or run.", service.pending)
        for name, value in (service.beat or {}).items():
            yield GaugeMetricFamily(f"colossalai_generator_{name}", "See GeneratorStats.", float(value))


class GenerationTimer:
    """Times one generation for the histograms."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._start = metrics, time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._open = True
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.in_flight.inc()

    def tokens(self, count: int) -> None:
        if count and self._first is None:
            self._first = time.monotonic()
            self._metrics.first_token.observe(self._first - self._start)
        self._tokens += count
        self._metrics.output_tokens.inc(count)

    def whole(self, count: int) -> None:
        """Note tokens that came at once, of which nobody knows when the first was there."""
        self._metrics.output_tokens.inc(count)

    def end(self, reason: str) -> None:
        """Note the end; further ones are of no effect."""
        if not self._open:
            return
        self._open = False
        self._metrics.in_flight.dec()
        self._metrics.finished.labels(reason).inc()
        now = time.monotonic()
        self._metrics.duration.observe(now - self._start)
        if self._first is not None and self._tokens > 1:
            self._metrics.per_token.observe((now - self._first) / (self._tokens - 1))
