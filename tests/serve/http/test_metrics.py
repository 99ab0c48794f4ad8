"""The Prometheus metrics of /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine


@pytest.fixture(scope="module")
def metrics():
    with serving(FakeEngine()) as served:
        served.complete("|four")
        served.complete("|four")
        served.complete("endless", max_tokens=7)
        served.complete("x" * 200_000)
        answer = served.ask("GET", "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.raw.decode()))
    assert all(family.name.startswith(("jaxkv:", "process_")) for family in families)
    assert all(family.documentation for family in families)
    return {
        (sample.name.removeprefix("jaxkv:"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_of_the_engine(metrics):
    assert metrics["num_requests_running",] == 0 and metrics["num_requests_waiting",] == 0
    assert metrics["kv_cache_usage_perc",] == 0.25
    assert (metrics["prefix_cache_queries_total",], metrics["prefix_cache_hits_total",]) == (
        100,
        40,
    )
    assert metrics["prefix_cache_misses_total", "cold"] == 50
    assert (metrics["prefix_entries",], metrics["prefix_entries_stored",]) == (8, 3)
    assert [metrics[f"memory_{use}_bytes",] for use in ("weights", "sequences", "prefixes")] == [
        30,
        20,
        10,
    ]
    assert metrics["compilations_total",] == 5
    assert metrics["iteration_tokens_total_count",] == 7
    assert metrics["iteration_tokens_total_sum",] == 70
    assert metrics["iteration_tokens_total_bucket", "16"] == 6
    assert metrics["generation_tokens_total",] == 17
    assert (metrics["prefix_host_entries",], metrics["prefix_host_entries_stored",]) == (9, 5)
    assert metrics["prefix_cache_demotions_total",] == 6
    gauges = ("entries_stored", "entries_waiting", "bytes")
    assert [metrics[f"prefix_disk_{name}",] for name in gauges] == [12, 2, 3000]
    counters = ("hits", "writes", "evictions", "failures", "lost")
    assert [metrics[f"prefix_disk_{name}_total",] for name in counters] == [7, 13, 1, 4, 8]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the files of /proc")
def test_metrics_of_the_process(metrics):
    assert metrics["process_resident_memory_bytes",] > 50e6 and metrics["process_open_fds",] > 3


def test_finished_answers_are_counted(metrics):
    assert metrics["prompt_tokens_total",] == 6 + 6 + 8
    assert metrics["prompt_tokens_by_source_total", "local_compute"] == 6 + 1 + 8
    assert metrics["prompt_tokens_by_source_total", "local_cache_hit"] == 5
    assert metrics["request_success_total", "stop"] == 2
    assert metrics["request_success_total", "length"] == 1


@pytest.mark.parametrize("name, count", [
    ("time_to_first_token_seconds", 3),
    ("e2e_request_latency_seconds", 3),
    ("request_queue_time_seconds", 3),
    ("request_prefill_time_seconds", 3),
    ("request_decode_time_seconds", 3),
    ("request_prompt_tokens", 3),
    ("request_generation_tokens", 3),
    ("inter_token_latency_seconds", 4 + 4 + 6),
])  # fmt: skip
def test_histograms_count_every_answer(metrics, name, count):
    assert metrics[f"{name}_count",] == count
    assert metrics[f"{name}_bucket", "+Inf"] == count
    assert metrics[f"{name}_sum",] >= 0


def test_two_servers_count_separately(served):
    served.complete("|x")
    with serving(FakeEngine()) as second_server:
        raw = second_server.ask("GET", "/metrics").raw.decode()
    assert "jaxkv:prompt_tokens_total 0.0" in raw


def test_routers_read_the_names_of_vllm():
    with serving(FakeEngine(), metrics_prefix="vllm") as served:
        lines = served.ask("GET", "/metrics").raw.decode().splitlines()
    named = {line.split(" ")[0] for line in lines if not line.startswith("#")}
    assert named >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc",
        "vllm:kv_cache_usage_perc",
    }  # fmt: skip
    assert all(name.startswith(("vllm:", "process_")) for name in named)
