"""Conversations of the notebook on shared prefixes."""

from __future__ import annotations

import pytest

import models
from evals import conversations, prefix_report
from jaxkv.engine import Prefixes


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_a_turn_sends_all_before_it_and_users_begin_alike(llm):
    asked = conversations.talk(llm, users=2, turns=3, instructions=20)
    assert asked.turns == [0, 0, 1, 1, 2, 2]
    prompts = [request.tokens for request in asked.requests]
    for user in (0, 1):
        first, second, third = prompts[user::2]
        assert second[: len(first)] == first and third[: len(second)] == second
    assert prompts[0][:20] == prompts[1][:20] and prompts[0][20:] != prompts[1][20:]
    assert conversations.talk(llm, 2, 3, 20).requests == asked.requests


def test_keys_are_alike_as_far_as_prompts_are():
    one, other = (conversations.keys([*range(40), last, *range(23)]) for last in (40, 41))
    assert len(one) == 4 and one[:2] == other[:2]
    assert all(a != b for a, b in zip(one[2:], other[2:], strict=True))


def test_hits_are_those_of_the_report():
    found = conversations.hits(("full", "rekey"), (0.5, 1.0), 60)
    setting = prefix_report.Setting(mode="rekey", p=1.0, requests=60, block=16, slots=16)
    assert found["rekey"][1] == prefix_report.hits(setting, 0) and found["full"] == [0, 0]


@pytest.mark.slow
def test_what_is_found_need_not_be_read(llm):
    asked = conversations.talk(llm, users=2, turns=2, instructions=70)
    policy = "streaming:sinks=2,window=30"
    none, kept = (
        conversations.serve(llm, policy, asked, how, chunk=32) for how in (None, Prefixes(8))
    )
    assert none.tokens == kept.tokens and (none.found, none.bytes) == (0, 0)
    assert kept.read + kept.found == none.read and kept.found >= 64
    assert len(kept.first(asked.turns)) == 2
    assert len(conversations.table({policy: (none, kept)}).splitlines()) == 2
