"""What /metrics tells, as Prometheus reads it: the names are vLLM's, behind `jaxkv:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxkv.engine.request import Outcome

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TOKENS = tuple(4.0**power for power in range(11))

# Name here, name among the engine's figures, what it is.
GAUGES = (
    ("num_requests_running", "running", "Answers that a slot is at work on"),
    ("num_requests_waiting", "waiting", "Answers that wait for a slot"),
    ("num_tokens_waiting", "waiting_tokens", "Tokens of the prompts that wait"),
    ("kv_cache_usage_perc", "cache_usage", "Share of the cache that is in use, from 0 to 1"),
    ("prefix_snapshot_slots", "snapshot_slots", "Places for snapshots of prefixes"),
    ("prefix_snapshot_slots_used", "snapshot_slots_used", "Those that hold one"),
    ("prefix_snapshot_slots_held", "snapshot_slots_held", "Those that an answer is reading"),
    ("prefix_host_slots", "host_slots", "Places for them in the memory of the host"),
    ("prefix_host_slots_used", "host_slots_used", "Those that hold one"),
)
COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens that were looked up"),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens that were found"),
    ("prefix_cache_evictions", "evictions", "Snapshots given up for others"),
    ("prefix_cache_demotions", "demotions", "Snapshots that went to the memory of the host"),
    ("prefix_cache_promotions", "promotions", "Snapshots that came back from there"),
    ("generation_tokens", "generation_tokens", "Tokens of answers"),
    ("num_preemptions", "preemptions", "Answers that gave up their slot for a time"),
    ("compilations", "compilations", "Programs compiled, warming up included"),
)
PHASES = {
    "time_to_first_token_seconds": lambda o: o.first,
    "e2e_request_latency_seconds": lambda o: o.ended,
    "request_queue_time_seconds": lambda o: o.begun,
    "request_prefill_time_seconds": lambda o: _between(o.begun, o.first),
    "request_decode_time_seconds": lambda o: _between(o.first, o.ended),
}


def _between(begun: float | None, ended: float | None) -> float | None:
    return None if begun is None or ended is None else ended - begun


class Metrics:
    """Counts what one server answers. figures: the engine's own, asked at every scrape."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures, self._registry = figures, CollectorRegistry()
        self._registry.register(self)
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts")
        self._sources = self._counter(
            "prompt_tokens_by_source", "Tokens of prompts, computed or taken from a cache", "source"
        )
        self._ended = self._counter("request_success", "Answers that are over", "finished_reason")
        self._phases = {name: self._histogram(name, SECONDS) for name in PHASES}
        self._sizes = self._histogram("request_prompt_tokens", TOKENS)
        self._lengths = self._histogram("request_generation_tokens", TOKENS)
        self.between_tokens = self._histogram("inter_token_latency_seconds", SECONDS)

    def add(self, outcome: Outcome, reason: str) -> None:
        """Count an answer that has ended; from any thread."""
        if outcome.begun is not None:  # and not given up while it waited
            self._prompts.inc(outcome.read_tokens + outcome.cached_tokens)
            self._sources.labels("local_compute").inc(outcome.read_tokens)
            self._sources.labels("local_cache_hit").inc(outcome.cached_tokens)
        self._ended.labels(reason).inc()
        self._sizes.observe(outcome.prompt_tokens)
        self._lengths.observe(outcome.new_tokens)
        for name, histogram in self._phases.items():
            if (seconds := PHASES[name](outcome)) is not None:
                histogram.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Names for the registry to compare; those of the engine are nobody else's."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's figures as they are now."""
        figures = self._figures()
        for name, key, what in GAUGES:
            yield GaugeMetricFamily(f"jaxkv:{name}", what, figures[key])
        for name, key, what in COUNTERS:
            yield CounterMetricFamily(f"jaxkv:{name}", what, figures[key])
        misses = CounterMetricFamily(
            "jaxkv:prefix_cache_misses", "Prompt tokens not found", labels=["reason"]
        )
        for reason, tokens in figures["misses"].items():
            misses.add_metric([reason], tokens)
        yield misses
        yield HistogramMetricFamily(
            "jaxkv:iteration_tokens_total", "Tokens read and written in one step of the engine",
            figures["step_sizes"], figures["step_tokens"],
        )  # fmt: skip

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"jaxkv:{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        what = name.replace("_", " ").capitalize()
        return Histogram(f"jaxkv:{name}", what, registry=self._registry, buckets=buckets)
