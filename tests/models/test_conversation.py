"""Conversations: behind every answer the cache holds exactly what was shown."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.chat import Chat
from jaxkv.models.streams import Stream
from tests.tiny import BEGIN, END, write_tiny

POLICY = "streaming:sinks=2,window=30"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("conversation") / "tiny"))


def holds(talk: models.Conversation, ids: list[int]) -> None:
    """The cache goes on like that of a stream that read these tokens."""
    fresh = Stream(talk.llm, POLICY)
    fresh.prefill([ids])
    assert int(talk.stream.decoding.position[0]) == len(ids)
    fresh.prefill([[40]])
    talk.stream.prefill([[40]])
    np.testing.assert_allclose(talk.stream.decoding.logits, fresh.decoding.logits, atol=1e-4)


def plain(llm, text: str) -> list[int]:
    return llm.tokenizer.encode(text, bos=False)


def test_plain_lines(llm):
    talk = models.Conversation(llm, POLICY, system="Be brief.")
    first = "".join(talk.say("Hello", max_new_tokens=9))
    held = llm.tokenizer.encode("Be brief.\nHello\n") + talk.output.tokens
    assert talk.output.reason == "length" and first == talk.output.text
    "".join(talk.say("And?", max_new_tokens=9))
    holds(talk, held + plain(llm, "\nAnd?\n") + talk.output.tokens)
    assert [m["role"] for m in talk.messages] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip


def test_a_template(llm):
    chat = Chat(TEMPLATE, (("bos_token", BEGIN), ("eos_token", END)))
    talk = models.Conversation(dataclasses.replace(llm, chat=chat), POLICY, system="Hm")
    "".join(talk.say("Hello", max_new_tokens=9))
    held = [0, *plain(llm, "[system Hm][user Hello]"), *talk.output.tokens]
    "".join(talk.say("And?", max_new_tokens=9))
    holds(talk, [*held, 1, *plain(llm, "[user And?]"), *talk.output.tokens])


def test_a_stop_string_leaves_the_cache_too(llm):
    whole = models.Conversation(llm, POLICY)
    text = "".join(whole.say("Hello", max_new_tokens=30))
    # A stop string between letters that are one token each, at its first place.
    places = (i for i in range(5, 25) if text[i - 1 : i + 2].isascii())
    at = next(i for i in places if text.find(text[i : i + 2]) == i)
    talk = models.Conversation(llm, POLICY)
    shown = "".join(talk.say("Hello", max_new_tokens=30, stop=[text[at : at + 2]]))
    assert (shown, talk.output.reason) == (text[:at], "stop")
    tokens = talk.output.tokens
    kept = next(n for n in range(30) if llm.tokenizer.decode(tokens[:n], start=False) == shown)
    held = llm.tokenizer.encode("Hello\n") + tokens[:kept]
    "".join(talk.say("And?", max_new_tokens=5))
    holds(talk, held + plain(llm, "\nAnd?\n") + talk.output.tokens)


def test_the_end_token_is_not_held(llm):
    """An answer that the model ends itself; which token that is, is chosen to fit."""
    draft = models.Conversation(llm, POLICY)
    "".join(draft.say("Hello", max_new_tokens=9))
    end = draft.output.tokens[4]
    config = dataclasses.replace(llm.config, eos=(end,))
    talk = models.Conversation(dataclasses.replace(llm, config=config), POLICY)
    "".join(talk.say("Hello", max_new_tokens=9))
    assert talk.output.reason == "eos" and talk.output.tokens[-1] == end
    holds(talk, llm.tokenizer.encode("Hello\n") + talk.output.tokens[:-1])


def test_interrupt(llm):
    talk = models.Conversation(llm, POLICY)
    for piece in talk.say("Hello", max_new_tokens=10**9, ignore_eos=True):
        assert piece
        talk.interrupt()
    assert talk.output.reason == "interrupted"
    holds(talk, llm.tokenizer.encode("Hello\n") + talk.output.tokens)


def test_a_growing_cache_counts_what_it_holds(llm):
    talk = models.Conversation(llm, "full:start=32,max=64")
    for _ in range(2):
        "".join(talk.say("Hello", max_new_tokens=8))
    assert talk.stream.lengths[0] == int(talk.stream.decoding.position[0]) < 64
