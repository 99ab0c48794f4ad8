"""Conversations of the notebook on shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, takewhile

import pytest

from jaxkv import models
from jaxkv.colab import conversations
from jaxkv.evals.prefix_caching import report, traces
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import PrefixConfig, Request, answer


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_users_share_only_their_instructions(llm):
    said = conversations.make_turns(llm, users=2, turns=3, instructions=20)
    first, second, _ = said
    assert first[0][:20] == first[1][:20] and first[0][20:] != first[1][20:]
    assert second[0][:20] != first[0][:20]
    assert conversations.make_turns(llm, 2, 3, 20) == said
    assert conversations.max_length(said) >= max(
        sum(map(len, user)) for user in zip(*said, strict=True)
    )


@pytest.mark.slow
def test_hit_rates_are_those_of_the_report():
    rates = conversations.measure_hit_rates((4, 8), requests=60, seeds=2)
    setting = replace(report.ONE_PROMPT, mode="rekey", concurrent=8, requests=60)
    alone = [report.hits(setting, seed) for seed in (0, 1)]
    assert (rates["rekey"][1]["min"], rates["rekey"][1]["max"]) == (min(alone), max(alone))
    assert [rate["max"] for rate in rates["full"]] == [0, 0]
    assert rates["formula"][1]["median"] == report.closed_form(8, setting)


def test_an_index_with_room_for_all_blocks_finds_every_repeated_prefix():
    """Counted a second way: leading ids of a request that an earlier one had."""
    trace = traces.read(conversations.TRACE)
    seen, blocks, hits = set(), 0, 0
    for request in trace.requests:
        hits += len(list(takewhile(seen.__contains__, request.keys)))
        seen |= set(request.keys)
        blocks += len(request.keys)
    small_index, all_of_them = conversations.hit_rate_by_capacity(trace, (0.1, 1.0))
    assert all_of_them == pytest.approx(100 * hits / blocks)
    assert small_index < all_of_them and len(trace.requests) == 400


def test_the_shipped_requests_are_the_first_of_the_published_trace(shared):
    file = shared / "traces" / "mooncake_conversation_trace.jsonl"
    with file.open(encoding="utf-8") as published:
        assert conversations.TRACE.read_text("utf-8") == "".join(islice(published, 400))


@pytest.mark.slow
def test_cached_tokens_are_not_computed_and_answers_do_not_change(llm):
    said = conversations.make_turns(llm, users=2, turns=2, instructions=70)

    def talk(engine):
        """Both turns of both users; a second turn begins with the first, without its answer."""
        prompts, answers = [(), ()], []
        for new in said:
            prompts = [(*prompt, *turn) for prompt, turn in zip(prompts, new, strict=True)]
            answers += answer(engine, [Request(prompt, 8) for prompt in prompts])
        return answers

    engines = (
        make_engine(
            llm, "streaming:sinks=2,window=30", max_batch=4, chunk=32, prefix_cache=prefixes
        )
        for prefixes in (None, PrefixConfig(num_blocks=8))
    )
    served = conversations.serve_both(*engines, talk, rounds=2)
    recomputed, kept = served[conversations.RECOMPUTED], served[conversations.CACHED]
    assert recomputed.tokens == kept.tokens
    assert recomputed.bytes == 0 and not recomputed.cached.any()
    assert (kept.read + kept.cached == recomputed.read).all() and kept.cached.sum() >= 64
    first, second = (recomputed.prompts[at : at + 2] for at in (0, 2))
    cached_tokens = [len(said[0][user]) + len(said[1][user]) for user in (0, 1)]
    assert second.tolist() == cached_tokens and first.tolist() == [len(turn) for turn in said[0]]
    assert kept.first.shape == (2, 4) and (kept.first > 0).all()
    assert len(conversations.reuse_table({"streaming": served}).splitlines()) == 2
    drawn = conversations.draw_first_token_by_turn({"streaming": served}, 2, "a caption")
    assert drawn.png.startswith(b"\x89PNG")
