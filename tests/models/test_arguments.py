"""Wrong arguments raise a one-line error, and nothing hangs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError


@pytest.mark.parametrize("prompt", [None, 5, "", b"hi", [], [[]], [1.5, 2.0], [1, "a"], [[1.5]]])
def test_invalid_prompts_are_refused(tiny, prompt):
    with pytest.raises(UserError, match="prompt"):
        models.generate(tiny, prompt, max_new_tokens=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "5"},
        {"max_new_tokens": True},
        {"chunk": 0},
        {"temperature": "hot"},
        {"temperature": 1e300},
        {"top_k": 1.5},
        {"repetition_penalty": 1e300},
        {"seed": None},
        {"seed": "x"},
        {"seed": [0.5]},
        {"stop": 5},
        {"stop": [5]},
        {"sampling": "hot"},
        {"policy": None},
        {"policy": 5},
        {"warmth": 1.0},
    ],
)
def test_invalid_arguments_are_refused_by_name(tiny, unchecked, fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        models.generate(tiny, "a", **({"max_new_tokens": 2} | fields))


def test_streams_and_conversations_check_their_arguments(tiny):
    with pytest.raises(UserError, match="chunk must be at least 1, got -5"):
        models.Stream(tiny).prefill([[3, 4]], chunk=-5)
    with pytest.raises(UserError, match="start must be a whole number"):
        models.Stream(tiny, start=2**32)
    conversation = models.Conversation(tiny, "streaming:sinks=2,window=30")
    with pytest.raises(UserError, match="max_new_tokens must be at least 1, got 0"):
        conversation.say("x", max_new_tokens=0)
    with pytest.raises(UserError, match="a stop string must not be empty"):
        conversation.say("x", stop=[""])
    assert conversation.messages == []


def test_arrays_of_token_ids_are_prompts(tiny):
    import jax.numpy as jnp

    ids = [3, 4, 5]
    answers = [
        models.generate(tiny, prompt, "streaming:sinks=2,window=30", 3, ignore_eos=True).tokens
        for prompt in (ids, np.array(ids), jnp.array(ids))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_common_mistakes_are_explained(tiny):
    with pytest.raises(UserError, match=r"the model must come from models.load, got 'path'"):
        models.generate("path", "a")
    with pytest.raises(UserError, match="a model is a folder, a GGUF file or a Hub id"):
        models.load(None)
    with pytest.raises(UserError, match="a list of token ids, got 'hello'"):
        models.score(tiny, "hello", "window:window=9")


def test_policies_by_layer_as_strings(tiny):
    answers = [
        models.generate(tiny, "a", policy, 3, ignore_eos=True).tokens
        for policy in ("window:window=9", ["window:window=9"] * tiny.config.layers)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "policy, tokens",
    [("window:window=1", 64), ("window:window=300", 256), ("streaming:sinks=4,window=1020", 1024),
     ("full", 1024)],
)  # fmt: skip
def test_the_default_chunk_follows_the_policy(tiny, policy, tokens):
    assert models.Stream(tiny, policy).chunk_of(None) == tokens


def test_a_long_chunk_is_cut_to_the_prompt(tiny):
    stream = models.Stream(tiny, "window:window=8")
    stream.prefill([[3] * 600], chunk=10**12)
    assert int(stream.decoding.position[0]) == 600
