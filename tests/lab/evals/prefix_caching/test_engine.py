"""Requests of the experiments on prefix caching and serving, and the errors they detect."""

from __future__ import annotations

import asyncio
import itertools
import json
import types
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import serving, soak
from jaxkv.evals.prefix_caching import agents, engine
from jaxkv.evals.prefix_caching.traces import RecordedRequest
from jaxkv.serve.engine import Engine, PrefixConfig
from tests.serve.engine.plain import VOCAB, plain
from tests.serve.http.conftest import serving as serve
from tests.serve.http.fake import FakeEngine

TEXTS = [list(range(serving.LONG + 50)), list(range(5000, 2 * serving.LONG + 5000))]


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_prompts_of_mooncake_share_prefixes_where_its_ids_do(llm, tmp_path):
    rows = [{"input_length": 1300, "output_length": 80, "hash_ids": [1, 2, 3]},
            {"input_length": 1025, "output_length": 3, "hash_ids": [1, 2, 9]}]  # fmt: skip
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    (first, second), chunk = engine.mooncake(llm, tmp_path / "trace", 5, 8)
    assert (len(first.tokens), len(second.tokens), chunk) == (162, 128, 64)
    assert (first.max_new_tokens, second.max_new_tokens) == (10, 1)
    assert first.tokens[:128] == second.tokens and first.tokens[128:160] != first.tokens[:32]


def test_prompts_of_azure_share_no_prefix(llm, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,800,80\n1,800,4\n")
    (first, second), _ = engine.azure(llm, path, 9, 8)
    assert len(first.tokens) == len(second.tokens) == 100 and first.tokens[:4] != second.tokens[:4]
    assert (first.max_new_tokens, second.max_new_tokens) == (10, 1)


def test_frequent_prompts_of_the_report_are_ten(llm):
    load = engine.report_load(llm, 1.0, 200)
    assert len({request.tokens for request in load.requests}) == 10
    assert len({request.tokens for request in engine.report_load(llm, 0.0, 50).requests}) == 50
    assert {len(request.tokens) for request in load.requests} == {15}
    assert 100 < np.mean([request.max_new_tokens for request in load.requests]) < 124


@pytest.mark.slow
def test_equal_prompts_hit_except_the_first(llm):
    load = engine.report_load(llm, 1.0, 6)
    load = load._replace(requests=[replace(request, max_new_tokens=2) for request in load.requests])
    results = engine.run(llm, load, "full", 2, 64, 1, "title")
    assert (results["requests"], results["prompt_tokens"], results["new_tokens"]) == (6, 90, 12)
    assert 0 < results["hit_rate_tokens"] < 8 / 15 and results["times_faster"]["n"] == 1


def test_different_answers_end_the_run(llm, monkeypatch):
    load = engine.report_load(llm, 1.0, 4)
    reported = iter(range(100))
    idle_engine = types.SimpleNamespace(reset_prefix_cache=lambda: True, bytes={"prefixes": 0})
    monkeypatch.setattr(engine, "make_engine", lambda *_, **__: idle_engine)
    monkeypatch.setattr(
        engine, "answer", lambda *_: [types.SimpleNamespace(tokens=[next(reported)])]
    )
    with pytest.raises(RuntimeError, match="changes answers"):
        engine.run(llm, load, "full", 2, 4, 1, "title")


def test_passages_are_stretches_of_the_texts():
    for passage in itertools.islice(serving.passages(TEXTS, 3), 20):
        assert len(passage) == serving.LONG
        assert list(passage) == list(range(passage[0], passage[0] + serving.LONG))
    again = itertools.islice(serving.passages(TEXTS, 3), 5)
    assert list(again) == list(itertools.islice(serving.passages(TEXTS, 3), 5))


def test_a_time_to_first_token_requires_the_expected_cached_tokens():
    engine = Engine(plain(), max_batch=1, chunk=16, prefix_cache=PrefixConfig(num_blocks=8))
    prompt = tuple(np.random.default_rng(0).integers(0, VOCAB, 50).tolist())
    assert serving.to_first(engine, prompt, 0) > 0
    assert serving.to_first(engine, prompt, 48) > 0
    with pytest.raises(RuntimeError, match="0 tokens were to be cached, 48 were"):
        serving.to_first(engine, prompt, 0)


def test_saved_tokens_of_agents_are_their_repeated_prefixes(llm):
    """Counted without an index: the longest prefix of each turn that an earlier turn had."""
    rng = np.random.default_rng(4)
    said = rng.integers(3, 4000, 2000).tolist()
    turns = [said[:n] + rng.integers(3, 4000, 40).tolist() for n in (300, 600, 900, 500, 1990)]
    results = agents.measure(llm, [RecordedRequest(tuple(turn), len(turn)) for turn in turns])
    saved = 0
    for n, turn in enumerate(turns):
        alike = [sum(itertools.takewhile(bool, map(lambda a, b: a == b, turn, old)))
                 for old in turns[:n]]  # fmt: skip
        saved += min(max(alike, default=0), len(turn) - 1) // agents.CHUNK * agents.CHUNK
    assert results["full"]["saved"] == saved > 0
    for policy in results["policies"].values():
        shares = [point["of_full"] for point in policy["entries"].values()]
        assert all(0 < share <= 1 for share in shares)
        assert all(point["distinct"] <= point["bytes"] for point in policy["entries"].values())


def test_the_soak_client_reads_streamed_and_whole_answers():
    body = {"model": "bytes", "prompt": "|some words", "max_tokens": 20}
    with serve(FakeEngine()) as served:

        async def ask_all(*hows):
            return [
                await soak.ask_server(served.port, body, soak.SoakRequest(0, *how)) for how in hows
            ]

        hows = ((False, ""), (True, ""), (True, "amid"), (False, "before"), (False, "next"),
                (False, "", "one", True))  # fmt: skip
        assert asyncio.run(ask_all(*hows)) == ["some words", "some words", "", "", "", "some words"]
        figures = asyncio.run(soak.metrics(served.port))
        assert figures["jaxkv:num_requests_waiting"] == 0
        body["model"] = "nobody"
        with pytest.raises(RuntimeError, match="404"):
            asyncio.run(ask_all((False, "")))


@pytest.mark.parametrize(
    "wrong, changed, missed",
    [(0, {}, 0), (1, {}, 1), (0, {"files": 9}, 1), (0, {"resident": 120}, 1),
     (0, {"compilations": 8}, 1), (0, {"prefixes_in_use": 1}, 1), (0, {"resident": 80}, 0),
     (0, {"unfair": 2.5}, 1), (0, {"lost": 30}, 1)],
)  # fmt: skip
def test_the_soak_bars_detect_wrong_answers_and_leaks(wrong, changed, missed):
    rest = {"resident": 100, "files": 8, "compilations": 7, "prefixes_in_use": 0, "prefix_hits": 40}
    begin = rest | {"resident": 50, "prefix_hits": 0}
    first = {"unfairness": [1.2], "rests": [begin, rest, rest, rest]}
    second = {
        "unfairness": [changed.get("unfair", 1.0)] * 2,
        "rests": [begin | {"prefix_hits": changed.get("lost", 0)}, rest, rest, rest | changed],
    }
    soaked = {"wrong": wrong, "finished": 900, "lives": [first, second]}
    assert sum(not line["met"] for line in soak.bars("full", "fixed", soaked)) == missed
    growing = soak.bars("full", "growing", soaked)  # a near tie may be another token
    assert sum(not line["met"] for line in growing) == missed - wrong
    many = soak.bars("full", "growing", soaked | {"wrong": 10})
    assert sum(not line["met"] for line in many) == missed - wrong + 1


def test_unfairness_compares_keys_while_all_have_clients():
    keys, ends = [], []
    for key, rate in zip(soak.CLIENTS, (1, 2, 2, 2), strict=True):  # answers a second
        keys += [key] * 100
        ends += [n / rate for n in range(1, 101)]
    assert soak.unfairness(keys, ends) == pytest.approx(2, rel=0.02)  # until the fast keys end


def test_clients_disconnect_at_the_configured_rates():
    rng = np.random.default_rng(0)
    how = [soak.draw_request(rng) for _ in range(3000)]
    for when, share in soak.LEAVES.items():
        assert abs(np.mean([request.leaves == when for request in how]) - share) < 0.03
    assert all(request.stream for request in how if request.leaves == "amid")
    assert {request.kind for request in how} == set(range(soak.KINDS))
