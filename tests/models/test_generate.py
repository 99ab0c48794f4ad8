"""Generated text does not depend on batches, chunks, blocks or streaming."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.decoding import BLOCK
from jaxkv.models.generation.streams import Stream
from jaxkv.models.generation.text import Generation
from jaxkv.sampling import Sampling

SMALL = "streaming:sinks=2,window=14"
PROMPTS = ["A", "Once upon a time there was a cat, ", "He said:", "x" * 14, "1 2 3 4 5 6 "]
SEEDS = [3, 1, 4, 1, 5]
WARM = Sampling(temperature=0.9, top_k=50)
# Compiling takes most of the time, so most tests share their shapes.
COMMON = {"sampling": WARM, "ignore_eos": True, "chunk": 16}
CONTEXT, EOS, VOCAB = 96, (1, 7), 258


@pytest.fixture(scope="module")
def llm(tiny):
    assert (tiny.config.context, tiny.eos, tiny.config.vocab) == (CONTEXT, EOS, VOCAB)
    return tiny


@pytest.fixture(scope="module")
def shallow(llm):
    """The model with its first layer only."""
    return replace(llm, config=replace(llm.config, layers=1, windows=(None,)))


@pytest.fixture(scope="module")
def alone(llm):
    """The answer to each prompt, generated alone."""
    return [
        models.generate(llm, prompt, SMALL, 60, seed=seed, **COMMON)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


def test_an_answer_and_its_metrics(llm, alone):
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        assert len(answer.tokens) == 60 and answer.finish_reason == "length"
        assert answer.text == llm.tokenizer.decode(answer.tokens, start=False)
        assert answer.prompt_tokens == len(llm.tokenizer.encode(prompt))
        assert jaxkv.policy(answer.policy) == jaxkv.policy(SMALL)
        assert answer.state_bytes == jaxkv.state_bytes(llm.policies(SMALL), llm.spec, 1)
        assert min(answer.prefill_seconds, answer.decode_seconds, answer.compile_seconds) >= 0
        assert answer.tokens_per_second > 0
    fresh = models.generate(llm, PROMPTS[0], "streaming:sinks=3,window=29", 2)
    assert fresh.compile_seconds > 0, "a policy that no other test has must be compiled"
    assert len({tuple(answer.tokens) for answer in alone}) == len(PROMPTS)


def test_a_batch_equals_its_sequences_alone(llm, alone):
    together = models.generate(llm, PROMPTS, SMALL, 60, seed=SEEDS, **COMMON)
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert [a.text for a in together] == [a.text for a in alone]
    reseeded = models.generate(llm, PROMPTS, SMALL, 60, seed=9, **COMMON)
    assert all(a.tokens != b.tokens for a, b in zip(reseeded, alone, strict=True))


def test_token_ids_are_a_prompt(llm, alone):
    ids = llm.tokenizer.encode(PROMPTS[1])
    for prompt in (ids, np.asarray(ids), tuple(ids)):
        answer = models.generate(llm, prompt, SMALL, 60, seed=1, **COMMON)
        assert answer.tokens == alone[1].tokens
    by_layer = [SMALL] * llm.config.layers
    batch = models.generate(llm, [ids], by_layer, 60, seed=1, **COMMON)
    assert [a.tokens for a in batch] == [alone[1].tokens]


@pytest.mark.parametrize("sampling", [WARM, Sampling()], ids=["warm", "greedy"])
def test_a_stream_equals_an_answer(llm, sampling):
    settings = COMMON | {"max_new_tokens": 150, "sampling": sampling, "seed": 4}
    pieces = list(models.stream(llm, PROMPTS[1], SMALL, **settings))
    answer = models.generate(llm, PROMPTS[1], SMALL, **settings)
    assert "".join(pieces) == answer.text and len(pieces) > 1


@pytest.mark.parametrize("limit", [1, 7, BLOCK])
def test_text_does_not_depend_on_blocks(llm, alone, limit):
    stream = Stream(llm, SMALL, seed=1)
    stream.prefill([llm.tokenizer.encode(PROMPTS[1])], chunk=16)
    tokens = []
    while len(tokens) < 60:
        block, done = stream.decode(WARM, min(limit, 60 - len(tokens)), ())
        assert block.shape[1] <= limit and not done.any()
        tokens += block[0].tolist()
    assert tokens == alone[1].tokens


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_an_answer_has_the_requested_number_of_tokens(llm, tokens):
    answer = models.generate(llm, PROMPTS[1], SMALL, tokens, **COMMON)
    assert len(answer.tokens) == tokens and answer.finish_reason == "length"


@pytest.mark.parametrize("policy", [SMALL, "full:max=128,start=16"])
def test_text_does_not_depend_on_chunks_of_the_prompt(llm, policy):
    prompt = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 55)))
    settings = COMMON | {"max_new_tokens": 30}
    answers = [models.generate(llm, prompt, policy, **settings | {"chunk": c}) for c in (7, 16, 64)]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens


def test_a_second_turn_continues_the_cache(llm):
    """Prefill, decode and prefill again equals one prefill of all the tokens."""
    first, second = llm.tokenizer.encode("Hello there. "), llm.tokenizer.encode(" And then?")
    stream = Stream(llm, SMALL, seed=2)
    stream.prefill([first])
    answer = stream.decode(WARM, 20, ())[0][0].tolist()
    stream.prefill([second])
    one_turn = Stream(llm, SMALL, seed=2)
    one_turn.prefill([first + answer + second])
    assert stream.decode(WARM, 20, ())[0].tolist() == one_turn.decode(WARM, 20, ())[0].tolist()


# The end of a sequence


def test_sequences_end_at_either_eos(llm):
    """Each sequence ends at its first EOS id, of two. Its tokens are those without any EOS id."""
    settings = COMMON | {"sampling": Sampling(temperature=3.0, top_k=VOCAB), "seed": SEEDS}
    endless = models.generate(llm, PROMPTS, SMALL, 2 * BLOCK, **settings)
    ended = models.generate(llm, PROMPTS, SMALL, 2 * BLOCK, **settings | {"ignore_eos": False})
    ends = set()
    for stopped, unstopped in zip(ended, endless, strict=True):
        assert unstopped.finish_reason == "length"
        at = [i for i, token in enumerate(unstopped.tokens) if token in EOS]
        size = at[0] + 1 if at else 2 * BLOCK
        assert stopped.finish_reason == ("eos" if at else "length")
        assert stopped.tokens == unstopped.tokens[:size]
        shown = stopped.tokens[:-1] if at else stopped.tokens  # an EOS token has no text
        assert stopped.text == llm.tokenizer.decode(shown, start=False)
        ends |= {stopped.tokens[-1]} & set(EOS)
    assert ends == set(EOS), "the test must reach both EOS ids"


def test_stop_strings_of_a_batch(llm, alone):
    stop = alone[1].text[50:53]
    stopped = models.generate(
        llm, PROMPTS, SMALL, 60, seed=SEEDS, stop=[stop, "never said"], **COMMON
    )
    for answer, free in zip(stopped, alone, strict=True):
        stops = stop in free.text
        assert answer.text == free.text[: free.text.index(stop) if stops else None]
        assert answer.finish_reason == ("stop" if stops else "length")
        assert answer.tokens == free.tokens[: len(answer.tokens)]
    assert stopped[1].finish_reason == "stop" and len(stopped[1].tokens) < 60
    settings = COMMON | {
        "max_new_tokens": 60,
        "seed": SEEDS[1],
        "stop": stop,
    }  # one string instead of a list
    assert "".join(models.stream(llm, PROMPTS[1], SMALL, **settings)) == stopped[1].text


# Memory and limits


def test_a_full_cache_doubles_up_to_its_maximum(llm, monkeypatch):
    stream = Stream(llm, "full:max=80,start=16")
    sizes = []
    for tokens in (16, 1, 40, 23):
        stream.reserve(tokens)
        sizes.append(stream.decoding.states[0].positions.shape[1])
    assert sizes == [16, 32, 64, 80]
    monkeypatch.setattr(
        "jaxkv.models.generation.streams.prefill_chunk", None
    )  # the error must precede any computation
    with pytest.raises(UserError, match=r"at most 80 tokens and 81 are needed; raise max"):
        stream.prefill([[65]])
    with pytest.raises(UserError, match=r"at most 80 tokens and 105 are needed"):
        models.generate(llm, "abcd", "full:max=80,start=16", 100)
    with pytest.raises(UserError, match=r"at most 80 tokens and 105 are needed"):
        models.stream(llm, "abcd", "full:max=80,start=16", 100)


def test_sequences_that_end_early_use_fewer_slots(llm):
    """A sequence counts its cached tokens, not the limit of each call."""
    stream = Stream(llm, SMALL)
    for _ in range(5):
        stream.prefill([[65, 66]], chunk=16)
        block, done = stream.decode(WARM, 50, eos=tuple(range(VOCAB)))
        assert block.shape == (1, 1) and done.all()
    assert stream.lengths.max() <= 15


@pytest.mark.parametrize(
    ("policy", "lookback"), [("streaming:sinks=4,window=100", 104), ("full:max=512", 110)]
)
def test_a_lookback_beyond_the_trained_context_warns(llm, policy, lookback, monkeypatch):
    # Type checks in a thread that compiles would restore the filters that pytest.warns has set.
    monkeypatch.setattr(Stream, "compile_ahead", lambda *_: None)
    with pytest.warns(
        UserWarning, match=rf"looks back {lookback} tokens.*trained context of {CONTEXT}"
    ):
        Generation(llm, [[65] * 10], policy, max_new_tokens=100)
    Generation(llm, [[65] * 10], "streaming:sinks=4,window=92", max_new_tokens=100)
    Generation(llm, [[65] * 10], "h2o", max_new_tokens=CONTEXT - 10)  # unlimited, in a short text
    with pytest.warns(UserWarning, match=r"looks back without limit, beyond the trained context"):
        Generation(llm, [[65] * 10], "h2o", max_new_tokens=None)


@pytest.mark.parametrize("policy", ["full", "snapkv:capacity=40", "0=full;*=window:window=32"])
def test_a_prompt_beyond_the_context_is_refused_under_a_growing_cache(llm, policy, monkeypatch):
    prompts = [[65] * 10, [65] * (CONTEXT + 1)]
    with pytest.raises(UserError, match=rf"context of {CONTEXT} tokens, got {CONTEXT + 1}; "):
        Generation(llm, prompts, policy, max_new_tokens=1)
    # Not pytest.warns: programs of the test before may still compile, and the type checker changes
    # the filters of all threads meanwhile.
    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda message, *_, **__: said.append(str(message)))
    Generation(llm, [[65] * CONTEXT], policy, max_new_tokens=1)
    assert any("looks back" in message for message in said)


def test_a_bounded_cache_takes_a_prompt_beyond_the_context(llm):
    answer = models.generate(llm, [65] * (2 * CONTEXT), SMALL, max_new_tokens=1)
    assert answer.prompt_tokens == 2 * CONTEXT


def test_an_endless_text_warns_when_it_exceeds_the_context(llm, recwarn):
    """The warning names the tokens in use, not the maximum of the cache."""
    pieces = models.stream(llm, "abcd", "full", **COMMON)
    next(pieces)
    assert not recwarn
    while not recwarn:
        next(pieces)
    said = str(recwarn.pop().message)
    assert re.match(rf"full looks back \d{{2,3}} tokens, .* context of {CONTEXT}", said)
    next(pieces)
    assert not recwarn


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(llm, dtype):
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    half = models.load(llm.path, dtype=dtype)
    wide, near = (Stream(model, SMALL, batch=5) for model in (llm, half))
    for stream in (wide, near):
        stream.prefill(prompts, chunk=16)
    assert {str(state.k.dtype) for state in near.decoding.states} == {dtype}
    difference = np.abs(np.asarray(near.decoding.logits - wide.decoding.logits)).max()
    assert 0 < difference < (0.2 if dtype == "bfloat16" else 0.03)
    block, _ = near.decode(WARM, 20, ())
    assert block.shape == (5, 20) and np.isfinite(np.asarray(near.decoding.logits)).all()


def test_a_policy_that_compresses_the_prompt(shallow):
    """Dense during prefill and halved at its end, for each sequence separately."""
    halving = "uniform:sinks=2,window=4,rounds=1,start=8"
    prompts = [[65 + i % 20 for i in range(30)], [70 + i % 9 for i in range(11)]]
    run = Stream(shallow, halving, batch=2)
    run.prefill(prompts, chunk=16)
    assert run.decoding.states[0].dense.positions.shape == (2, 32)
    run.finish_prefill()
    assert run.decoding.states[0].dense.positions.shape == (2, 7)
    assert run.decoding.states[0].sample.positions.shape[2] == 13
    together = models.generate(shallow, prompts, halving, 12, **COMMON)
    alone = models.generate(shallow, prompts[0], halving, 12, **COMMON)
    assert together[0].tokens == alone.tokens
    assert (
        together[0].state_bytes > 2 * run.state_bytes // 3
    )  # the compressed state and the slots after it


def test_a_policy_that_samples(shallow):
    """The sample depends on the seed of a sequence, not on the other sequences."""
    sampling = "reservoir:sinks=1,window=3,sample=2"
    settings = COMMON | {"sampling": Sampling(), "max_new_tokens": 25}
    together = models.generate(shallow, PROMPTS, sampling, seed=SEEDS, **settings)
    for sequence in (0, 4):
        alone = models.generate(
            shallow, PROMPTS[sequence], sampling, seed=SEEDS[sequence], **settings
        )
        assert alone.tokens == together[sequence].tokens
    reseeded = models.generate(shallow, PROMPTS, sampling, seed=6, **settings)
    assert [a.tokens for a in reseeded] != [a.tokens for a in together]


# Errors


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        *((prompt, {}, "prompt") for prompt in (None, "", b"hi", [], [[]])),
        (["A", []], {}, "the prompt is empty"),
        ([258], {}, "token ids must be from 0 to 257, got 258..258"),
        ([5, -1], {}, r"token ids must be from 0 to 257, got -1\.\.5"),
        ("\ud800", {}, "lone surrogate at character 0"),
        ("A", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ("A", {"chunk": 0}, "chunk must be at least 1, got 0"),
        ("A", {"stop": [""]}, "a stop string must not be empty"),
        ("A", {"seed": [1, 2]}, "got 2 seeds for 1 sequences"),
        ("A", {"seed": -1}, r"a seed must be from 0 to 4294967295, got \[-1\]; give 0"),
        ("A", {"seed": 2**32}, "a seed must be from 0 to 4294967295"),
        ("A", {"temprature": 1.0}, "unknown argument 'temprature'; sampling has temperature"),
        ("A", {"sampling": WARM, "top_k": 3}, "give sampling= or its fields"),
        ("A", {"policy": "streming"}, "did you mean 'streaming'"),
        (["A", "B"], {"policy": "window:window=1000000000"}, r"caches of 2 sequence.*GiB is free"),
    ],
)
def test_invalid_arguments_are_refused(llm, prompt, options, message):
    with pytest.raises(UserError, match=message):
        models.generate(llm, prompt, **options)


def test_a_text_without_tokens_is_refused(llm):
    """A normaliser may remove all of a text, and not every tokenizer has a BOS."""
    tokenizer = replace(llm.tokenizer, front=(), ids_of=lambda text, start, separator: [])
    silent = replace(llm, tokenizer=tokenizer)
    with pytest.raises(UserError, match="the prompt is empty; give at least one token"):
        models.generate(silent, " ", SMALL)


def test_nan_logits_after_one_token_are_reported(shallow):
    """Argmax picks the first NaN, here at an EOS id. That must not end the sequence."""
    embed = np.array(shallow.weights["embed"])
    stream = Stream(shallow, SMALL)
    stream.prefill([[65, 66]])
    first = int(np.argmax(stream.decoding.logits[0]))
    embed[first] = np.nan  # logits after the first new token are NaN
    broken = replace(shallow, weights=shallow.weights | {"embed": jnp.asarray(embed)})
    stream = Stream(broken, SMALL)
    stream.prefill([[65, 66]])
    with pytest.raises(UserError, match="not finite numbers"):
        stream.decode(Sampling(), 5, (0,))


@pytest.mark.parametrize("eos", [(), tuple(range(VOCAB))])
@pytest.mark.parametrize("sampling", [WARM, Sampling(0.5, top_k=3), Sampling(1.0, top_p=0.5)])
def test_one_nan_logit_is_reported_under_every_sampling(shallow, sampling, eos):
    stream = Stream(shallow, SMALL)
    stream.prefill([[65, 66]])
    broken = stream.decoding.logits.at[0, 5].set(jnp.nan)
    stream.decoding = stream.decoding._replace(logits=broken)
    with pytest.raises(UserError, match=r"logits that are not finite .* check the weights"):
        stream.decode(sampling, 2, eos)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "5"},
        {"max_new_tokens": True},
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
def test_arguments_of_wrong_types_are_refused_by_name(llm, unchecked, fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        models.generate(llm, "a", **({"max_new_tokens": 2} | fields))


def test_streams_and_conversations_check_their_arguments(llm):
    with pytest.raises(UserError, match="chunk must be at least 1, got -5"):
        models.Stream(llm).prefill([[3, 4]], chunk=-5)
    with pytest.raises(UserError, match="start must be a whole number"):
        models.Stream(llm, start=2**32)
    conversation = models.Conversation(llm, "streaming:sinks=2,window=30")
    with pytest.raises(UserError, match="max_new_tokens must be at least 1, got 0"):
        conversation.say("x", max_new_tokens=0)
    with pytest.raises(UserError, match="a stop string must not be empty"):
        conversation.say("x", stop=[""])
    assert conversation.messages == []


def test_common_mistakes_are_explained(llm):
    with pytest.raises(UserError, match=r"the model must come from models.load, got 'path'"):
        models.generate("path", "a")
    with pytest.raises(UserError, match="a model is a folder, a GGUF file or a Hub id"):
        models.load(None)
    with pytest.raises(UserError, match="a list of token ids, whole numbers, got 'hello'; encode"):
        models.score(llm, "hello", "window:window=9")


@pytest.mark.parametrize(
    "policy, tokens",
    [("window:window=1", 64), ("window:window=300", 256), ("streaming:sinks=4,window=1020", 1024),
     ("full", 1024)],
)  # fmt: skip
def test_the_default_chunk_follows_the_policy(llm, policy, tokens):
    assert models.Stream(llm, policy).chunk_of(None) == tokens


def test_a_long_chunk_is_cut_to_the_prompt(llm):
    stream = models.Stream(llm, "window:window=8")
    stream.prefill([[3] * 600], chunk=10**12)
    assert int(stream.decoding.position[0]) == 600
