"""The usage of a request, and the Prometheus metrics of /metrics.

The names of metrics are vLLM's with another prefix. Those of the process have the names that all
clients of Prometheus give them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxkv.serve.engine.request import Outcome, Request

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TOKENS = tuple(4.0**power for power in range(11))

# Name of the metric, name in the engine's metrics, description.
GAUGES = (
    ("num_requests_running", "running", "Requests in prefill or decode"),
    ("num_requests_waiting", "waiting", "Requests that wait in the queue"),
    ("num_tokens_waiting", "waiting_tokens", "Prompt tokens of waiting requests"),
    ("decode_batch_size", "batch_size", "Sequences that a step of the engine computes"),
    ("kv_cache_usage_perc", "cache_usage", "Fraction of --max-batch in use, from 0 to 1"),
    ("gpu_cache_usage_perc", "cache_usage", "The same; routers read this older name"),
    ("memory_weights_bytes", "bytes_of_weights", "Bytes of the weights"),
    ("memory_sequences_bytes", "bytes_of_sequences", "Bytes allocated for sequences"),
    ("memory_prefixes_bytes", "bytes_of_prefixes", "Bytes allocated for the prefix cache"),
    # An entry of the prefix cache is a block or a snapshot.
    ("prefix_entries", "prefix_entries", "Blocks or snapshots that fit on the device"),
    ("prefix_entries_stored", "prefix_entries_stored", "Blocks or snapshots stored"),
    ("prefix_entries_in_use", "prefix_entries_in_use", "Blocks or snapshots that requests use"),
    ("prefix_host_entries", "host_entries", "Blocks or snapshots that fit on the host"),
    ("prefix_host_entries_stored", "host_entries_stored", "Blocks or snapshots on the host"),
    ("prefix_disk_entries_stored", "disk_entries", "Blocks or snapshots on the disk"),
    ("prefix_disk_entries_waiting", "disk_entries_waiting", "Blocks or snapshots to be written"),
    ("prefix_disk_bytes", "disk_bytes", "Bytes of all files of the prefix folder"),
)
COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens that were looked up"),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens that were found"),
    ("prefix_cache_evictions", "evictions", "Blocks or snapshots evicted"),
    ("prefix_cache_demotions", "demotions", "Blocks or snapshots moved to the host"),
    ("prefix_cache_promotions", "promotions", "Blocks or snapshots moved back"),
    ("prefix_disk_hits", "disk_hits", "Blocks or snapshots read from the disk"),
    ("prefix_disk_writes", "disk_writes", "Blocks or snapshots written to the disk"),
    ("prefix_disk_evictions", "disk_evictions", "Files deleted because the folder was full"),
    ("prefix_disk_failures", "disk_failures", "Files that could not be written or read"),
    ("prefix_disk_lost", "disk_lost", "Blocks or snapshots that left memory without being written"),
    ("generation_tokens", "generation_tokens", "Generated tokens"),
    ("compilations", "compilations", "Programs compiled, also at the start"),
)
USAGE = ("requests", "prompt_tokens", "cached_tokens", "generation_tokens")
KEY_NAMES = 1000  # with metrics of their own, because each takes memory here and in Prometheus
PHASES = {
    "time_to_first_token_seconds": lambda o: o.first_token_seconds,
    "e2e_request_latency_seconds": lambda o: o.total_seconds,
    "request_queue_time_seconds": lambda o: o.queue_seconds,
    "request_prefill_time_seconds": lambda o: _between(o.queue_seconds, o.first_token_seconds),
    "request_decode_time_seconds": lambda o: _between(o.first_token_seconds, o.total_seconds),
}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class UsageRecord:
    """The tokens and times of one request, which the threads of server and engine write.

    id: answer id. requests: one per answer; n consecutive ones have one prompt, which counts
    once. api_key: the name of its key; empty without keys.
    """

    def __init__(self, id: str, requests: Sequence[Request], n: int, api_key: str) -> None:
        self.id, self.api_key = id, api_key
        self._prompts, self._n = [len(request.tokens) for request in requests], n
        self._start = time.perf_counter()
        self._new = [0] * len(requests)
        self._first: float | None = None
        self._ends: dict[int, tuple[Outcome, str]] = {}

    def token(self, index: int) -> None:
        """Count a new token of an answer."""
        self._new[index] += 1
        if self._first is None:
            self._first = time.perf_counter() - self._start

    def end(self, index: int, outcome: Outcome, reason: str) -> None:
        self._ends[index] = outcome, reason

    def is_first(self, index: int) -> bool:
        """Whether an answer is the first one to its prompt."""
        return index % self._n == 0

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts[:: self._n])

    @property
    def new_tokens(self) -> int:
        return sum(self._new)

    def fields(self) -> dict[str, Any]:
        """The fields of the log; answers that have not ended yet were left by their client."""
        ends = [self._ends.get(index) for index in range(len(self._new))]
        fields: dict[str, Any] = {
            "answer_id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(end[0].cached_tokens for end in ends[:: self._n] if end),
            "completion_tokens": self.new_tokens,
            "finish_reasons": [end[1] if end else "cancelled" for end in ends],
        }
        if self._first is not None:
            fields["first_token_seconds"] = round(self._first, 6)
        return fields


class Metrics:
    """The metrics of one server. engine_metrics: called at every scrape. prefix: of all names."""

    def __init__(self, engine_metrics: Callable[[], Mapping[str, Any]], prefix: str) -> None:
        self._engine_metrics, self._registry = engine_metrics, CollectorRegistry()
        self._prefix = prefix
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, files and CPU seconds, where it can
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts")
        self._sources = self._counter(
            "prompt_tokens_by_source", "Tokens of prompts, computed or taken from a cache", "source"
        )
        self._ended = self._counter("request_success", "Finished requests", "finished_reason")
        self._responses = self._counter(
            "http_requests", "Requests by status; 499 if the client left", "handler", "status"
        )
        self._refusals = self._counter("request_refusals", "Refused requests", "reason")
        self._phases = {name: self._histogram(name, SECONDS) for name in PHASES}
        self._sizes = self._histogram("request_prompt_tokens", TOKENS)
        self._lengths = self._histogram("request_generation_tokens", TOKENS)
        self._usage = {
            quantity: self._counter(
                f"api_key_{quantity}", f"{quantity} by the name of the API key", "api_key"
            )
            for quantity in USAGE
        }
        self._key_names: set[str] = set()
        self.between_tokens = self._histogram("inter_token_latency_seconds", SECONDS)

    def add(self, outcome: Outcome, reason: str) -> None:
        """Count a finished answer; from any thread."""
        if outcome.queue_seconds is not None:  # it did not end while waiting
            self._prompts.inc(outcome.computed_tokens + outcome.cached_tokens)
            self._sources.labels("local_compute").inc(outcome.computed_tokens)
            self._sources.labels("local_cache_hit").inc(outcome.cached_tokens)
        self._ended.labels(reason).inc()
        self._sizes.observe(outcome.prompt_tokens)
        self._lengths.observe(outcome.new_tokens)
        for name, histogram in self._phases.items():
            if (seconds := PHASES[name](outcome)) is not None:
                histogram.observe(seconds)

    def use(self, name: str, outcome: Outcome | None, first: bool = False) -> None:
        """Count a request that is answered, or one of its answers that ended; from any thread.

        name: of the API key; nothing is counted without keys. first: the answer is the first one
        to its prompt, so that the tokens count as in the usage of a response.
        """
        if not name:
            return
        if name not in self._key_names and len(self._key_names) >= KEY_NAMES:
            name = "other"
        self._key_names.add(name)
        cached, computed = 0, 0
        if outcome is not None and first and outcome.queue_seconds is not None:
            cached, computed = outcome.cached_tokens, outcome.computed_tokens
        new = 0 if outcome is None else outcome.new_tokens
        values = (outcome is None, cached + computed, cached, new)
        for quantity, value in zip(USAGE, values, strict=True):
            self._usage[quantity].labels(name).inc(value)

    def respond(self, handler: str, status: int, refusal: str | None) -> None:
        """Count a response. handler: its path. refusal: why it was refused, or None."""
        self._responses.labels(handler, status).inc()
        if refusal is not None:
            self._refusals.labels(refusal).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """No names to compare: the engine's metrics are unique."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's current metrics."""
        values = self._engine_metrics()
        for name, key, description in GAUGES:
            yield GaugeMetricFamily(f"{self._prefix}:{name}", description, values[key])
        for name, key, description in COUNTERS:
            yield CounterMetricFamily(f"{self._prefix}:{name}", description, values[key])
        misses = CounterMetricFamily(
            f"{self._prefix}:prefix_cache_misses", "Prompt tokens not found", labels=["reason"]
        )
        for reason, tokens in values["misses"].items():
            misses.add_metric([reason], tokens)
        yield misses
        yield HistogramMetricFamily(
            f"{self._prefix}:iteration_tokens_total",
            "Prefilled and decoded tokens in one engine step",
            values["step_sizes"],
            values["step_tokens"],
        )

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", description, labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        description = name.replace("_", " ").capitalize()
        return Histogram(
            f"{self._prefix}:{name}", description, registry=self._registry, buckets=buckets
        )
