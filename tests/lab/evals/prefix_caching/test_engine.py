"""Requests of the experiments on prefix caching and serving, and the errors they detect."""

from __future__ import annotations

import asyncio
import json
import types
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import serving, soak
from jaxkv.evals.prefix_caching import engine
from jaxkv.serve.engine import Engine, PrefixConfig
from tests.serve.engine.plain import VOCAB, plain
from tests.serve.http.conftest import serving as serve
from tests.serve.http.fake import FakeEngine, language

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


def test_equal_prompts_hit_except_the_first(llm):
    load = engine.report_load(llm, 1.0, 6)
    load = load._replace(requests=[replace(request, max_new_tokens=2) for request in load.requests])
    results = engine.time_load(llm, load, "full", 2, 64, 1, "title")
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
        engine.time_load(llm, load, "full", 2, 4, 1, "title")


def test_a_time_to_first_token_requires_the_expected_cached_tokens():
    engine = Engine(plain(), max_batch=1, chunk=16, prefix_cache=PrefixConfig(num_blocks=8))
    prompt = tuple(np.random.default_rng(0).integers(0, VOCAB, 50).tolist())
    assert serving.to_first(engine, prompt, 0) > 0
    assert serving.to_first(engine, prompt, 48) > 0
    with pytest.raises(RuntimeError, match="0 tokens were to be cached, 48 were"):
        serving.to_first(engine, prompt, 0)


def test_the_soak_client_reads_streamed_and_whole_answers():
    body = {"model": "bytes", "prompt": "|some words", "max_tokens": 20}
    question = soak.SoakQuestion(soak.COMPLETIONS, body)
    with serve(FakeEngine()) as served:

        async def ask_all(*hows):
            return [
                await soak.ask_server(served.port, question, soak.SoakRequest(0, *how))
                for how in hows
            ]

        hows = ((False, ""), (True, ""), (True, "amid"), (False, "before"), (False, "next"),
                (False, "", "one", True))  # fmt: skip
        assert asyncio.run(ask_all(*hows)) == ["some words", "some words", "", "", "", "some words"]
        figures = asyncio.run(soak.metrics(served.port))
        assert figures["jaxkv:num_requests_waiting"] == 0
        body["model"] = "nobody"
        with pytest.raises(RuntimeError, match="404"):
            asyncio.run(ask_all((False, "")))


@pytest.mark.parametrize("stream", [False, True])
def test_the_soak_client_reads_calls(stream):
    call = '<tool_call>{"name": "sum", "arguments": {"of": [1, 2]}}</tool_call>'
    message = {"role": "user", "content": f"|Well. {call}"}
    body = {"model": "bytes", "messages": [message], "tools": soak.TOOLS, "max_tokens": 99}
    with serve(FakeEngine(), language(soak.TEMPLATE)) as served:
        question = soak.SoakQuestion(soak.CHAT, body)
        text = asyncio.run(soak.ask_server(served.port, question, soak.SoakRequest(0, stream, "")))
    assert text == 'Well.sum{"of": [1, 2]}'


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
