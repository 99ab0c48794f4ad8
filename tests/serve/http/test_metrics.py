"""The Prometheus metrics of /metrics, request ids, and the log."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.serve.http import parse_api_keys
from jaxkv.serve.http.logs import JsonFormatter
from jaxkv.serve.http.metrics import KEY_NAMES, Metrics
from tests.serve.http.conftest import ENDLESS, eventually, serving
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


def test_routers_read_the_names_of_vllm():
    with serving(FakeEngine(), metrics_prefix="vllm") as served:
        lines = served.ask("GET", "/metrics").raw.decode().splitlines()
    named = {line.split(" ")[0] for line in lines if not line.startswith("#")}
    assert named >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc",
        "vllm:kv_cache_usage_perc",
    }  # fmt: skip
    assert all(name.startswith(("vllm:", "process_")) for name in named)


@pytest.mark.parametrize("path, status", [
    ("/health", 200), ("/nowhere", 404), ("/v1/completions", 405),
])  # fmt: skip
def test_a_request_id_is_returned(served, path, status):
    answer = served.ask("GET", path, x_request_id="trace-7/a")
    assert (answer.status, answer.headers["x-request-id"]) == (status, "trace-7/a")


@pytest.mark.parametrize("request_id", [None, "", "two words", "x" * 201, "caf\xe9"])
def test_a_request_id_is_made(served, request_id):
    """Without a valid one of the client; each is different."""
    headers = {} if request_id is None else {"x_request_id": request_id}
    ids = [served.ask("GET", "/health", **headers).headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1] and all(re.fullmatch("[0-9a-f]{32}", text) for text in ids)


def test_refusals_without_a_key_or_by_a_bug_have_request_ids(monkeypatch, caplog):
    with serving(FakeEngine(), tenants=parse_api_keys("first", "keys")) as served:
        answer = served.complete("|x", {"x_request_id": "no-key"})
        assert (answer.status, answer.headers["x-request-id"]) == (401, "no-key")

        def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(FakeEngine, "submit", fail)
        headers = {"x_request_id": "bug-7", "authorization": "Bearer first"}
        answer = served.complete("|x", headers)
        assert (answer.status, answer.headers["x-request-id"]) == (500, "bug-7")
        assert "request bug-7 failed" in caplog.text


def samples(served, name: str) -> dict[tuple[str, ...], float]:
    """The counts of one metric by the values of its labels."""
    raw = served.ask("GET", "/metrics").raw.decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(raw)
        for sample in family.samples
        if sample.name == f"jaxkv:{name}_total"
    }


def test_responses_are_counted_by_status():
    with serving(FakeEngine(pause=0.002)) as served:
        served.complete("|x")
        served.complete("|x", stream=True)
        served.complete("|x", temperature=9)
        for path in ("/a", "/b", "/v1/models/other"):
            served.ask("GET", path)
        served.ask("POST", "/tokenize", {"model": "bytes", "prompt": "x"})
        served.ask("POST", "/v1/responses", {"model": "bytes", "input": "|x"})
        connection = served.send(ENDLESS)
        eventually(lambda: served.engine.handles)
        connection.close()
        counted = lambda: samples(served, "http_requests")
        eventually(lambda: ("/v1/completions", "499") in counted())
        counts = counted()
        assert counts.pop(("/metrics", "200")) >= 1
        assert counts == {
            ("/v1/completions", "200"): 2, ("/v1/completions", "400"): 1,
            ("/v1/completions", "499"): 1, ("other", "404"): 2, ("/v1/models", "404"): 1,
            ("/tokenize", "200"): 1, ("/v1/responses", "200"): 1,
        }  # fmt: skip


def test_refusals_are_counted_by_reason():
    with serving(FakeEngine(max_len=500, pause=0.01), max_in_flight=2) as served:
        with contextlib.closing(served.send(ENDLESS | {"max_tokens": 400})):
            eventually(lambda: served.engine.handles)
            served.complete("|x", n=2)
        eventually(lambda: not served.engine.handles)
        served.complete("!full")
        served.complete("x" * 600)
        served.complete("|x", temperature=9)
        served.complete("|x", model="other")
        served.complete("|x", {"host": "evil.example"})
        served.ask("GET", "/nowhere")
        served.engine.healthy = False
        served.ask("GET", "/health")
        counts = samples(served, "request_refusals")
    assert counts == {
        (reason,): 1 for reason in (
            "queue_full", "too_many_answers", "context_length_exceeded", "invalid_request",
            "model_not_found", "unknown_host", "unknown_route", "engine_unhealthy",
        )
    }  # fmt: skip


@pytest.fixture
def logged():
    """The lines of the log as JSON objects."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("jaxkv.serve.http")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_requests_are_logged_as_json(served, logged):
    headers = {"x_request_id": "one", "authorization": "Bearer secret"}
    answer = served.complete("|secret", headers).json
    served.ask("GET", "/no%0Awhere", x_request_id="two")
    eventually(lambda: len(logged()) == 2)
    first, second = logged()
    datetime.fromisoformat(first.pop("time"))
    assert 0 < first.pop("first_token_seconds") < first.pop("seconds") < 20
    assert first == {
        "level": "info", "message": "request", "request_id": "one", "method": "POST",
        "path": "/v1/completions", "status": 200, "answer_id": answer["id"], "prompt_tokens": 8,
        "cached_tokens": 0, "completion_tokens": 7, "finish_reasons": ["stop"],
    }  # fmt: skip
    assert (second["request_id"], second["path"], second["status"], second["refusal"]) == (
        "two", "/no\nwhere", 404, "unknown_route",
    )  # fmt: skip


@pytest.mark.parametrize("log_probes", [False, True])
def test_probes_are_logged_if_asked_or_if_they_fail(logged, log_probes):
    with serving(FakeEngine(), log_probes=log_probes) as served:
        for path in ("/health", "/metrics", "/version"):
            served.ask("GET", path)
        served.engine.healthy = False
        served.ask("GET", "/health")
        eventually(lambda: logged() and logged()[-1]["status"] == 503)
    probed = [(line["path"], line["status"]) for line in logged()]
    probes = [("/health", 200), ("/metrics", 200)] if log_probes else []
    assert probed == [*probes, ("/version", 200), ("/health", 503)]


KEYS = "alice-key name=alice\nbob-key salt name=bob\nalice-2 name=alice\nnobody"


def test_usage_is_reported_by_the_name_of_the_key(logged):
    """In the log and in the metrics as in the responses, also for a client that leaves."""
    keys = {"tenants": parse_api_keys(KEYS, "keys"), "admins": parse_api_keys("root", "admins")}
    used: dict[str, list[int]] = {}
    with serving(FakeEngine(pause=0.001), **keys) as served:
        asked = [("alice", "alice-key", "|four", 1), ("alice", "alice-key", "|four", 3),
                 ("alice", "alice-2", "|four", 1), ("bob", "bob-key", ["|a", "|bc"], 2),
                 ("unnamed", "nobody", "|x", 1)]  # fmt: skip
        for name, key, prompt, n in asked:
            answer = served.complete(prompt, {"authorization": f"Bearer {key}"}, n=n).json
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            values = [1, usage["prompt_tokens"], cached, usage["completion_tokens"]]
            total = used.setdefault(name, [0] * 4)
            used[name] = [a + b for a, b in zip(total, values, strict=True)]
            eventually(lambda: logged() and logged()[-1].get("answer_id") == answer["id"])  # noqa: B023
            line = logged()[-1]
            tokens = [line[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")]
            assert tokens == values[1:] and line["api_key"] == name
            assert line["finish_reasons"] == ["stop"] * len(answer["choices"])
        served.complete("|x", {"authorization": "Bearer bob-key"}, temperature=9)
        served.complete("|x", {"authorization": "Bearer wrong"})
        connection = served.send(ENDLESS | {"stream": True}, "bob-key")
        assert connection.recv(10)
        connection.close()
        eventually(lambda: any("cancelled" in line.get("finish_reasons", []) for line in logged()))
        eventually(lambda: not served.engine.handles)
        raw = served.ask("GET", "/metrics", authorization="Bearer root").raw.decode()
    *_, refused, unknown, gone = [line for line in logged() if line["path"] == "/v1/completions"]
    assert (refused["api_key"], refused["status"]) == ("bob", 400) and "api_key" not in unknown
    assert (gone["api_key"], gone["prompt_tokens"]) == ("bob", 8) and gone["completion_tokens"] > 0
    names = ("requests", "prompt_tokens", "cached_tokens", "generation_tokens")
    recorded = {
        name: [int(value) for metric in names for value in re.findall(
            rf'^jaxkv:api_key_{metric}_total{{api_key="{name}"}} (\d+)', raw, re.MULTILINE)]
        for name in used
    }  # fmt: skip
    assert recorded["alice"] == used["alice"] and recorded["unnamed"] == used["unnamed"]
    left_tokens = recorded["bob"][3] - used["bob"][3]
    assert recorded["bob"][:3] == [used["bob"][0] + 1, used["bob"][1] + 8, used["bob"][2]]
    assert left_tokens >= gone["completion_tokens"]
    secret = raw + json.dumps(logged())
    assert not any(f"{line.split()[0]}" in secret for line in KEYS.splitlines())


def test_labels_of_keys_are_bounded():
    metrics = Metrics(FakeEngine().metrics, "jaxkv")
    for number in range(KEY_NAMES + 50):
        metrics.use(f"key{number}", None)
    metrics.use("", None)
    raw = metrics.text().decode()
    counts = re.findall(r'jaxkv:api_key_requests_total{api_key="(.*)"} (\S+)', raw)
    assert len(counts) == KEY_NAMES + 1 and ("other", "50.0") in counts
