"""Metrics of the server for Prometheus.

Metrics that vLLM has, too, have its names with `tidemill:` in front.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from copy import copy

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.core.interfaces import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, model: str, pages: int) -> None:
        """Register the metrics. model: the label `model_name`. pages: KV pages of the engine."""
        self.registry = CollectorRegistry()
        self._model, self._engine = model, _Engine(model, pages)
        self.registry.register(self._engine)
        self._requests = Counter(
            "tidemill:http_requests", "Requests by route and status.", ("route", "method", "status"), registry=self.registry
        )
        labels = ("model_name", "finished_reason")
        self._ended = Counter(
            "tidemill:request_success", "Replies by the reason they ended for.", labels, registry=self.registry
        )
        self._first, self._each, self._whole = (
            Histogram(f"tidemill:{name}_seconds", help_text, ("model_name",), buckets=buckets, registry=self.registry)
            for name, help_text, buckets in (
                ("time_to_first_token", "From a reply's request to its first token.", FIRST_TOKEN_S),
                ("request_time_per_output_token", "Mean time of a reply's tokens after the first.", PER_TOKEN_S),
                ("e2e_request_latency", "From a reply's request to its end.", REQUEST_S),
            )
        )

    def text(self, stats: EngineStats) -> bytes:
        """All metrics in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self.registry)

    def answered(self, route: str, method: str, status: int) -> None:
        self._requests.labels(route, method, str(status)).inc()

    def reply(self, first_s: float, whole_s: float, tokens: int, reason: str) -> None:
        self._ended.labels(self._model, reason).inc()
        self._first.labels(self._model).observe(first_s)
        self._whole.labels(self._model).observe(whole_s)
        if tokens > 1:
            self._each.labels(self._model).observe((whole_s - first_s) / (tokens - 1))


class Clock:
    """Times of one reply, measured from its creation."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._begin = metrics, time.monotonic()
        self._first_s: float | None = None

    def copy(self) -> Clock:
        """A clock for another reply to the same request."""
        return copy(self)

    def first(self, seconds: float | None = None) -> None:
        """Note the first token; later calls change nothing. seconds: its time, if it is known."""
        if self._first_s is None:
            self._first_s = time.monotonic() - self._begin if seconds is None else seconds

    def finished(self, tokens: int, reason: str) -> None:
        whole_s = time.monotonic() - self._begin
        self._metrics.reply(whole_s if self._first_s is None else self._first_s, whole_s, tokens, reason)


class CountRequests:
    """Middleware that counts answers by route; unknown paths count as `other` to bound the labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]) -> None:
        """Count answers of `app`.

        routes: paths as they are declared; one that ends in `{name:path}` stands for all with that beginning.
        """
        self._app, self._metrics = app, metrics
        self._exact = {path for path in routes if "{" not in path}
        self._beginnings = [path.partition("{")[0] for path in routes if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
                self._metrics.answered(self._route(scope["path"]), method, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

    def _route(self, path: str) -> str:
        if path in self._exact:
            return path
        return next((f"{begin}{{name}}" for begin in self._beginnings if path.startswith(begin)), "other")


class _Engine(Collector):
    """The engine's own metrics, as they were last read."""

    stats: EngineStats | None = None

    def __init__(self, model: str, pages: int) -> None:
        self._model, self._pages = model, pages

    def collect(self) -> Iterator[Metric]:
        if (stats := self.stats) is None:
            return
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, help_text, value in (
            (gauge, "num_requests_running", "Replies that are being sampled.", stats.running),
            (gauge, "num_requests_waiting", "Replies that wait for their turn.", stats.waiting),
            (gauge, "kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", stats.kv_used),
            (gauge, "kv_pages_used", "KV pages in use.", round(stats.kv_used * self._pages)),
            (gauge, "kv_pages", "KV pages that there are.", self._pages),
            (counter, "prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            (counter, "generation_tokens", "Tokens sampled.", stats.generated),
            (counter, "prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", stats.prompt_tokens),
            (counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            (counter, "spec_decode_num_draft_tokens", "Tokens guessed by speculation.", stats.drafted_tokens),
            (counter, "spec_decode_num_accepted_tokens", "Guessed tokens that came true.", stats.accepted_tokens),
            (counter, "num_preemptions", "Replies interrupted for lack of KV pages.", stats.preemptions),
        ):
            metric = kind(f"tidemill:{name}", help_text, labels=("model_name",))
            metric.add_metric((self._model,), value)
            yield metric
