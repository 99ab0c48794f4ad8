"""Text in, text out: the same however it is batched, cut into chunks and blocks, or streamed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.decoding import BLOCK
from jaxkv.models.streams import Stream
from jaxkv.models.text import OutputText, Run
from jaxkv.sampling import Sampling

SMALL = "streaming:sinks=2,window=14"
PROMPTS = ["A", "Once upon a time there was a cat, ", "He said:", "x" * 14, "1 2 3 4 5 6 "]
SEEDS = [3, 1, 4, 1, 5]
WARM = Sampling(temperature=0.9, top_k=50)
# Most of the time of these tests is compiling, so most of them share their shapes.
COMMON = {"sampling": WARM, "ignore_eos": True, "chunk": 16}
CONTEXT, EOS, VOCAB = 96, (1, 7), 258


@pytest.fixture(scope="module")
def llm(tiny):
    assert (tiny.config.context, tiny.eos, tiny.config.vocab) == (CONTEXT, EOS, VOCAB)
    return tiny


@pytest.fixture(scope="module")
def shallow(llm):
    """Its first layer alone, where one is enough."""
    return replace(llm, config=replace(llm.config, layers=1, windows=(None,)))


@pytest.fixture(scope="module")
def alone(llm):
    """Each prompt by itself."""
    return [
        models.generate(llm, prompt, SMALL, 60, seed=seed, **COMMON)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


def test_an_answer_and_its_figures(llm, alone):
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


def test_a_batch_is_its_rows(llm, alone):
    together = models.generate(llm, PROMPTS, SMALL, 60, seed=SEEDS, **COMMON)
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert [a.text for a in together] == [a.text for a in alone]
    other = models.generate(llm, PROMPTS, SMALL, 60, seed=9, **COMMON)
    assert all(a.tokens != b.tokens for a, b in zip(other, alone, strict=True))


def test_ids_are_a_prompt(llm, alone):
    ids = llm.tokenizer.encode(PROMPTS[1])
    for prompt in (ids, np.asarray(ids), tuple(ids)):
        answer = models.generate(llm, prompt, SMALL, 60, seed=1, **COMMON)
        assert answer.tokens == alone[1].tokens
    batch = models.generate(llm, [ids], SMALL, 60, seed=1, **COMMON)
    assert [a.tokens for a in batch] == [alone[1].tokens]


@pytest.mark.parametrize("sampling", [WARM, Sampling()], ids=["warm", "greedy"])
def test_a_stream_is_an_answer(llm, sampling):
    settings = COMMON | {"max_new_tokens": 150, "sampling": sampling, "seed": 4}
    pieces = list(models.stream(llm, PROMPTS[1], SMALL, **settings))
    answer = models.generate(llm, PROMPTS[1], SMALL, **settings)
    assert "".join(pieces) == answer.text and len(pieces) > 1


@pytest.mark.parametrize("limit", [1, 7, BLOCK])
def test_blocks_do_not_matter(llm, alone, limit):
    stream = Stream(llm, SMALL, seed=1)
    stream.prefill([llm.tokenizer.encode(PROMPTS[1])], chunk=16)
    found = []
    while len(found) < 60:
        block, done = stream.decode(WARM, min(limit, 60 - len(found)), ())
        assert block.shape[1] <= limit and not done.any()
        found += block[0].tolist()
    assert found == alone[1].tokens


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_exactly_as_many_tokens(llm, tokens):
    answer = models.generate(llm, PROMPTS[1], SMALL, tokens, **COMMON)
    assert len(answer.tokens) == tokens and answer.finish_reason == "length"


@pytest.mark.parametrize("policy", [SMALL, "full:max=128,start=16"])
def test_chunks_of_a_prompt_do_not_matter(llm, policy):
    prompt = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 55)))
    settings = COMMON | {"max_new_tokens": 30}
    answers = [models.generate(llm, prompt, policy, **settings | {"chunk": c}) for c in (7, 16, 64)]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens


def test_a_second_turn_reads_on(llm):
    """Reading, writing and reading again leaves what one reading of it all would have left."""
    first, second = llm.tokenizer.encode("Hello there. "), llm.tokenizer.encode(" And then?")
    stream = Stream(llm, SMALL, seed=2)
    stream.prefill([first])
    said = stream.decode(WARM, 20, ())[0][0].tolist()
    stream.prefill([second])
    whole = Stream(llm, SMALL, seed=2)
    whole.prefill([first + said + second])
    assert stream.decode(WARM, 20, ())[0].tolist() == whole.decode(WARM, 20, ())[0].tolist()


# Where a row ends


def test_ends(llm):
    """Rows end at either eos, each by itself; until then they are what they are without one."""
    settings = COMMON | {"sampling": Sampling(temperature=3.0, top_k=VOCAB), "seed": SEEDS}
    endless = models.generate(llm, PROMPTS, SMALL, 2 * BLOCK, **settings)
    ended = models.generate(llm, PROMPTS, SMALL, 2 * BLOCK, **settings | {"ignore_eos": False})
    met = set()
    for one, other in zip(ended, endless, strict=True):
        assert other.finish_reason == "length"
        at = [i for i, token in enumerate(other.tokens) if token in EOS]
        size = at[0] + 1 if at else 2 * BLOCK
        assert one.finish_reason == ("eos" if at else "length")
        assert one.tokens == other.tokens[:size]
        shown = one.tokens[:-1] if at else one.tokens  # an end has no text
        assert one.text == llm.tokenizer.decode(shown, start=False)
        met |= {one.tokens[-1]} & set(EOS)
    assert met == set(EOS), "both were to be met"


def letters(text: str, *, eos: str = "", stops=()) -> tuple[OutputText, list[str]]:
    """A row fed one letter a token."""

    class Tokenizer:
        table, special, strip = tuple(bytes([i]) for i in range(128)), frozenset(), 0

    row = OutputText(SimpleNamespace(tokenizer=Tokenizer), [ord(e) for e in eos], stops)
    return row, [row.push(ord(letter)) for letter in text]


def test_a_stop_string_across_tokens():
    row, pieces = letters("one two three", stops=["two"])
    assert pieces == ["o", "n", "e", " ", "", "", "", "", "", "", "", "", ""]
    assert (row.text, row.reason, len(row.tokens)) == ("one ", "stop", 7)
    assert row.end("length") == "" and row.reason == "stop"


def test_what_was_held_back_comes_out():
    row, pieces = letters("a tw", stops=["two"])
    assert pieces == ["a", " ", "", ""] and row.text == "a "
    assert row.end("length") == "tw" and (row.text, row.reason) == ("a tw", "length")
    row, pieces = letters("a tw.", eos=".", stops=["two"])
    assert pieces == ["a", " ", "", "", "tw"] and (row.text, row.reason) == ("a tw", "eos")
    row, pieces = letters("a twin", stops=["two"])
    assert pieces == ["a", " ", "", "", "twi", "n"] and row.reason == ""


def test_half_a_character_comes_out_at_the_end():
    class Tokenizer:
        table, special, strip = ("é".encode()[:1], b"x"), frozenset(), 0

    row = OutputText(SimpleNamespace(tokenizer=Tokenizer), [], [])
    assert row.push(0) == "" and row.end("length") == "\ufffd"


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abab", "ba"], ["aaa", "abb", "bbbb"]])
def test_stop_strings_against_a_search(stops, rng):
    """Tokens of one to three letters; the plain way looks through the whole text each time."""
    vocabulary = ["a", "b", "c", "ab", "ba", "bb", "aca", "cab"]

    class Tokenizer:
        table, special, strip = tuple(v.encode() for v in vocabulary), frozenset(), 0

    for _ in range(200):
        row, whole, wanted = OutputText(SimpleNamespace(tokenizer=Tokenizer), [], stops), "", None
        pieces = []
        for token in rng.integers(0, len(vocabulary), 6):
            pieces.append(row.push(int(token)))
            if wanted is None:
                whole += vocabulary[token]
                found = [whole.index(stop) for stop in stops if stop in whole]
                wanted = whole[: min(found)] if found else None
        assert row.reason == ("" if wanted is None else "stop")
        pieces.append(row.end("length"))
        assert "".join(pieces) == row.text == (whole if wanted is None else wanted)


def test_stop_strings_of_a_batch(llm, alone):
    stop = alone[1].text[50:53]
    stopped = models.generate(
        llm, PROMPTS, SMALL, 60, seed=SEEDS, stop=[stop, "never said"], **COMMON
    )
    for one, free in zip(stopped, alone, strict=True):
        met = stop in free.text
        assert one.text == free.text[: free.text.index(stop) if met else None]
        assert one.finish_reason == ("stop" if met else "length")
        assert one.tokens == free.tokens[: len(one.tokens)]
    assert stopped[1].finish_reason == "stop" and len(stopped[1].tokens) < 60
    settings = COMMON | {"max_new_tokens": 60, "seed": SEEDS[1], "stop": stop}  # one alone will do
    assert "".join(models.stream(llm, PROMPTS[1], SMALL, **settings)) == stopped[1].text


# What it costs


def test_full_doubles_and_refuses(llm, monkeypatch):
    stream = Stream(llm, "full:max=80,start=16")
    sizes = []
    for tokens in (16, 1, 40, 23):
        stream.reserve(tokens)
        sizes.append(stream.decoding.states[0].positions.shape[1])
    assert sizes == [16, 32, 64, 80]
    monkeypatch.setattr("jaxkv.models.streams.prefill_chunk", None)  # nothing may run
    with pytest.raises(UserError, match=r"at most 80 tokens and 81 are needed; raise max"):
        stream.prefill([[65]])
    with pytest.raises(UserError, match=r"at most 80 tokens and 105 are needed"):
        models.generate(llm, "abcd", "full:max=80,start=16", 100)
    with pytest.raises(UserError, match=r"at most 80 tokens and 105 are needed"):
        models.stream(llm, "abcd", "full:max=80,start=16", 100)


def test_rows_that_end_early_leave_room(llm):
    """A row counts the tokens it holds, not those it was allowed to write."""
    stream = Stream(llm, SMALL)
    for _ in range(5):
        stream.prefill([[65, 66]], chunk=16)
        block, done = stream.decode(WARM, 50, eos=tuple(range(VOCAB)))
        assert block.shape == (1, 1) and done.all()
    assert stream.lengths.max() <= 15


def test_past_the_trained_context(llm):
    stream = Stream(llm, SMALL)
    stream.prefill([[65] * 10], chunk=16)
    for _ in range(4 * CONTEXT // BLOCK + 1):
        stream.decode(WARM, BLOCK, ())
    assert int(stream.decoding.position[0]) > 3 * CONTEXT
    leaves = jax.tree.leaves((stream.decoding.states, stream.decoding.logits))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves)


@pytest.mark.parametrize(
    ("policy", "lookback"), [("streaming:sinks=4,window=100", 104), ("full:max=512", 110)]
)
def test_a_lookback_beyond_the_trained_context_warns(llm, policy, lookback):
    with pytest.warns(
        UserWarning, match=rf"looks back {lookback} tokens.*trained context of {CONTEXT}"
    ):
        Run(llm, [[65] * 10], policy, max_new_tokens=100)
    Run(llm, [[65] * 10], "streaming:sinks=4,window=92", max_new_tokens=100)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(llm, dtype):
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    half = models.load(llm.folder, dtype=dtype)
    wide, near = (Stream(one, SMALL, batch=5) for one in (llm, half))
    for stream in (wide, near):
        stream.prefill(prompts, chunk=16)
    assert {str(state.k.dtype) for state in near.decoding.states} == {dtype}
    difference = np.abs(np.asarray(near.decoding.logits - wide.decoding.logits)).max()
    assert 0 < difference < (0.2 if dtype == "bfloat16" else 0.03)
    block, _ = near.decode(WARM, 20, ())
    assert block.shape == (5, 20) and np.isfinite(np.asarray(near.decoding.logits)).all()


def test_a_policy_that_compresses_the_prompt(shallow):
    """Exact until the prompt is complete, and halved after it, for each sequence by itself."""
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
    assert together[0].state_bytes > 2 * run.state_bytes // 3  # the compressed state, and its tail


def test_a_policy_that_samples(shallow):
    """What is remembered depends on a row's own seed, not on its neighbours."""
    sampling = "reservoir:sinks=1,window=3,sample=2"
    settings = COMMON | {"sampling": Sampling(), "max_new_tokens": 25}
    together = models.generate(shallow, PROMPTS, sampling, seed=SEEDS, **settings)
    for row in (0, 4):
        alone = models.generate(shallow, PROMPTS[row], sampling, seed=SEEDS[row], **settings)
        assert alone.tokens == together[row].tokens
    other = models.generate(shallow, PROMPTS, sampling, seed=6, **settings)
    assert [a.tokens for a in other] != [a.tokens for a in together]


# What a caller can mend


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "no prompt is given"),
        ([""], {}, "the prompt is empty"),
        (["A", []], {}, "the prompt is empty"),
        ([258], {}, "token ids must be from 0 to 257, got 258..258"),
        ([5, -1], {}, r"token ids must be from 0 to 257, got -1\.\.5"),
        ("\ud800", {}, "lone surrogate at character 0"),
        ("A", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ("A", {"chunk": 0}, "chunk must be at least 1, got 0"),
        ("A", {"stop": [""]}, "a stop string must not be empty"),
        ("A", {"stop": ""}, "a stop string must not be empty"),
        ("A", {"seed": [1, 2]}, "got 2 seeds for 1 sequences"),
        ("A", {"seed": -1}, "a seed must be from 0 to 4294967295"),
        ("A", {"seed": 2**32}, "a seed must be from 0 to 4294967295"),
        ("A", {"temprature": 1.0}, "unknown argument 'temprature'; sampling has temperature"),
        ("A", {"sampling": WARM, "top_k": 3}, "give sampling= or its fields"),
        ("A", {"policy": "streming"}, "did you mean 'streaming'"),
        (["A", "B"], {"policy": "window:window=1000000000"}, r"caches of 2 sequence.*GiB is free"),
    ],
)
def test_what_is_refused(llm, prompt, options, message):
    with pytest.raises(UserError, match=message):
        models.generate(llm, prompt, **options)


def test_a_text_without_tokens_is_refused(llm):
    """A normaliser may leave nothing of a text, and not every tokenizer has a BOS."""
    tokenizer = replace(llm.tokenizer, front=(), ids_of=lambda text: [])
    silent = replace(llm, tokenizer=tokenizer)
    with pytest.raises(UserError, match="the prompt is empty; give at least one token"):
        models.generate(silent, " ", SMALL)


@pytest.mark.parametrize("eos", [(), tuple(range(VOCAB))])
def test_a_model_that_gives_no_numbers_is_told(shallow, eos):
    spoilt = replace(shallow, weights=shallow.weights | {"norm": shallow.weights["norm"] * np.nan})
    stream = Stream(spoilt, SMALL)
    stream.prefill([[65, 66]])
    with pytest.raises(UserError, match=r"logits that are not finite .* check the weights"):
        stream.decode(Sampling(), 5, eos)


def test_a_number_that_is_none_for_one_token_is_told(shallow):
    """Nor does it count as an end, though the first NaN stands where an eos may be."""
    embed = np.array(shallow.weights["embed"])
    stream = Stream(shallow, SMALL)
    stream.prefill([[65, 66]])
    first = int(np.argmax(stream.decoding.logits[0]))
    embed[first] = np.nan  # the first new token spoils what comes after it
    spoilt = replace(shallow, weights=shallow.weights | {"embed": jnp.asarray(embed)})
    stream = Stream(spoilt, SMALL)
    stream.prefill([[65, 66]])
    with pytest.raises(UserError, match="not finite numbers"):
        stream.decode(Sampling(), 5, (0,))


@pytest.mark.parametrize("sampling", [WARM, Sampling(0.5, top_k=3), Sampling(1.0, top_p=0.5)])
def test_one_logit_that_is_no_number_is_told_however_tokens_are_drawn(shallow, sampling):
    stream = Stream(shallow, SMALL)
    stream.prefill([[65, 66]])
    spoilt = stream.decoding.logits.at[0, 5].set(jnp.nan)
    stream.decoding = stream.decoding._replace(logits=spoilt)
    with pytest.raises(UserError, match="not finite numbers"):
        stream.decode(sampling, 2, ())


def test_reading_says_how_far_it_has_come(shallow):
    seen: list[tuple[int, int]] = []
    Stream(shallow, SMALL, batch=2).prefill(
        [[65] * 20, [66] * 45], chunk=16, progress=lambda *at: seen.append(at)
    )
    assert seen == [(16, 45), (32, 45), (45, 45)]
