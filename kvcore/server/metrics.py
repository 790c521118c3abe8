"""Prometheus metrics, named as vLLM's are, with the prefix ``kvcore:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcore.engine.config import EngineStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the size of the page
Samples = dict[tuple[str, ...], float]
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """What the HTTP layer measures; with `follow`, what the engine counts too. A registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._model = ""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvcore:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self._between = histogram("inter_token_latency_seconds", "From a token to the next.", _BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", _WHOLE)
        self._responses = Counter(
            "kvcore:http_requests",
            "Requests to the API, by path and status.",
            ["path", "status"],
            registry=self.registry,
        )

    def follow(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """Name the model, and also show what its engine counts, read when somebody asks."""
        self._model = model
        self.registry.register(_Engine(stats, {"model_name": model}))

    def first_token(self, seconds: float) -> None:
        self._first.labels(self._model).observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.labels(self._model).observe(seconds)

    def whole_answer(self, seconds: float) -> None:
        self._whole.labels(self._model).observe(seconds)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    """The engine's counts at the moment of the scrape."""

    def __init__(self, stats: Callable[[], EngineStats], labels: dict[str, str]) -> None:
        self._stats, self._labels = stats, labels

    def describe(self) -> Iterator[Metric]:
        """Nothing: otherwise registering would ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return engine_metrics(self._stats(), self._labels)


def engine_metrics(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """The families of the engine's counts."""
    gauges, counters = GaugeMetricFamily, CounterMetricFamily

    def family(kind: Kind, name: str, text: str, samples: Samples, *more: str) -> Metric:
        made = kind(f"kvcore:{name}", text, labels=[*labels, *more])
        for key, value in samples.items():
            made.add_metric([*labels.values(), *key], value)
        return made

    def one(kind: Kind, name: str, text: str, value: float) -> Metric:
        return family(kind, name, text, {(): value})

    def by(name: str, text: str, counts: Mapping[str, int], label: str) -> Metric:
        return family(counters, name, text, {(key,): count for key, count in counts.items()}, label)

    used = sum(use.used for use in stats.kv.values())
    yield one(gauges, "num_requests_running", "Requests in the batch.", stats.running)
    yield one(gauges, "num_requests_waiting", "Requests in the queue.", stats.waiting)
    yield one(gauges, "kv_cache_usage_perc", "Share of the budget that rows take; 1 is all of it.", used / stats.budget)
    yield one(gauges, "kv_cache_budget_bytes", "Bytes that all caches may take.", stats.budget)
    rows: Samples = {
        (mode, kind): getattr(use, kind) for mode, use in stats.kv.items() for kind in ("running", "prefixes")
    }
    yield family(gauges, "kv_cache_bytes", "Bytes of rows, by mode and by what holds them.", rows, "mode", "holder")
    pages: Samples = {
        (mode, pool, state): getattr(count, state)
        for mode, use in stats.kv.items()
        for pool, count in use.pages.items()
        for state in ("free", "used", "shared")
    }
    yield family(gauges, "kv_cache_pages", "Pages; shared ones are used ones.", pages, "mode", "pool", "state")
    yield one(gauges, "prefixes", "Prefixes that are kept for reuse.", stats.prefixes)
    yield one(counters, "prompt_tokens", "Prompt tokens that were run.", stats.prompt_tokens)
    yield one(counters, "prefix_cached_tokens", "Prompt tokens that were not, as rows were there.", stats.cached_tokens)
    yield one(counters, "generation_tokens", "Tokens generated.", stats.generated_tokens)
    yield one(counters, "prefix_hits", "Look-ups that found rows to adopt.", stats.prefix_hits)
    yield one(counters, "prefix_misses", "Look-ups that found none.", stats.prefix_misses)
    yield by("prefix_declined", "Prefixes not adopted or not kept, by reason.", stats.prefix_declined, "reason")
    yield by("fallbacks", "Caches on graph operations, by reason.", stats.fallbacks, "reason")
    yield by("request_success", "Choices that ended, by reason.", stats.finished, "finished_reason")
    yield one(counters, "num_preemptions", "Requests that gave up their rows, to be run again.", stats.preemptions)
    yield one(counters, "engine_steps", "Steps of the engine.", stats.steps)
    yield one(counters, "listener_errors", "Answers that could not be handed over.", stats.listener_errors)
