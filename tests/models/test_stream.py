"""Streams in use: reserved slots, the end of prefill, positions, and their text."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation import streams
from jaxkv.models.generation.streams import Stream
from jaxkv.models.generation.text import OutputText
from jaxkv.sampling import Sampling
from jaxkv.state import memory

COMPRESSED = "uniform:sinks=2,window=4,rounds=1,start=8"


def test_a_refused_prefill_does_not_change_the_stream(tiny):
    stream = Stream(tiny, "full:max=16,start=8")
    stream.prefill([list(range(2, 8))])
    with pytest.raises(UserError, match="at most 16 tokens"):
        stream.prefill([[3] * 50])
    stream.prefill([[4] * 10])
    assert stream.lengths.max() == 16
    assert np.isfinite(stream.decoding.logits).all()


def test_each_sequence_counts_its_own_tokens(tiny):
    """Two sequences of 15 tokens fit a maximum of 15, however they are split into calls."""
    stream = Stream(tiny, "full:max=15,start=8", batch=2)
    stream.prefill([[3] * 10, [3] * 5])
    stream.prefill([[4] * 5, [4] * 10])
    assert stream.lengths.tolist() == [15, 15]


def test_compressed_and_growing_layers_count_tokens_separately(tiny):
    """A cache without an end of prefill counts the prompt too."""
    policies = (
        COMPRESSED,
        *["full:max=64,start=8"] * (tiny.config.layers - 1),
    )
    stream = Stream(tiny, policies)
    stream.prefill([list(range(2, 30))])
    stream.finish_prefill()
    for _ in range(3):
        stream.decode(Sampling(), 8, ())
    assert stream.decoding.states[1].positions.shape[1] == 64 and stream.lengths[0] == 52
    assert np.isfinite(stream.decoding.logits).all()


def test_reserved_slots_need_no_free_memory(tiny, monkeypatch):
    stream = Stream(tiny, "full:max=64,start=32")
    monkeypatch.setattr("jaxkv.state.memory.available", lambda device=None, host=False: 100)
    stream.prefill([[3] * 32])
    with pytest.raises(UserError, match="only 100 bytes is free"):
        stream.prefill([[3]])


def test_prefill_finishes_once_and_later_tokens_are_cached_exactly(tiny):
    stream = Stream(tiny, COMPRESSED)
    stream.prefill([list(range(2, 34))])
    stream.finish_prefill()
    sampled = np.asarray(stream.decoding.states[0].sample.positions)
    stream.prefill([[5] * 6])
    stream.finish_prefill()  # a second turn: it is not compressed
    stream.prefill([[6] * 6])
    state = stream.decoding.states[0]
    np.testing.assert_array_equal(state.sample.positions, sampled)
    assert sampled.shape[2] == 13 and int(state.dense.count[0]) == 2 + 4 + 12


def test_a_prompt_compressed_in_one_layer_gives_no_warning(tiny, recwarn):
    """If any layer compresses the prompt, there is no warning that it is too short."""
    stream = Stream(tiny, "pyramidkv:capacity=64,window=8")
    stream.prefill([[3] * 60])
    stream.finish_prefill()
    sizes = [int(np.isfinite(state.log_weight[0, 0]).sum()) for state in stream.decoding.states]
    assert sizes == [52, 2] and not recwarn
    stream = Stream(tiny, "pyramidkv:capacity=64,window=8")
    stream.prefill([[3] * 10])
    with pytest.warns(UserWarning, match="prompt of at least 11 tokens, got a prompt of 10"):
        stream.finish_prefill()


def test_losses_continue_from_the_position_of_a_stream(tiny):
    ids = list(np.random.default_rng(0).integers(2, 250, 80))
    all_losses = np.concatenate(list(models.losses(tiny, ids, "streaming:sinks=2,window=30")))
    stream = Stream(tiny, "streaming:sinks=2,window=30")
    stream.prefill([ids[:33]])
    rest = np.concatenate(list(models.losses(tiny, ids[33:], stream=stream)))
    np.testing.assert_allclose(rest, all_losses[33:], atol=1e-5)
    assert int(stream.decoding.position[0]) == 79


def test_a_repetition_penalty_covers_earlier_tokens(tiny):
    stream = Stream(tiny, "streaming:sinks=2,window=30")
    stream.prefill([[2, 3]])
    block, _ = stream.decode(Sampling(), 5, ())
    assert set(np.flatnonzero(stream.decoding.seen[0])) == {2, 3, *block[0].tolist()}


def test_an_abandoned_answer_stays_in_the_conversation(tiny):
    conversation = models.Conversation(tiny, "streaming:sinks=2,window=30")
    answer = conversation.say("hello", max_new_tokens=20, ignore_eos=True)
    next(answer)
    answer.close()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1]["content"] == conversation.output.text


def test_the_cost_of_a_token_of_text_is_constant(tiny):
    def seconds(output: OutputText, tokens: int) -> float:
        begin = time.process_time()
        for _ in range(tokens):
            output.push(40)
        return time.process_time() - begin

    output = OutputText(tiny, (), ())
    first = min(seconds(output, 2_000) for _ in range(5))
    seconds(output, 200_000)
    assert min(seconds(output, 2_000) for _ in range(5)) < 3 * first
    unkept = OutputText(tiny, (), (), keep=False)
    seconds(unkept, 1_000)
    assert unkept.count == 1_000 and not unkept.tokens and not unkept.text


def test_hash_tables_that_exceed_memory_are_refused_before_allocation(tiny, monkeypatch):
    """At the start of a stream, if its length is given, and at the end of prefill."""
    policy = "magicpig:K=4,L=300,sinks=1,window=4,start=64"
    stream = Stream(tiny, policy)
    stream.prefill([[3] * 40])
    free = 2 * stream.state_bytes
    monkeypatch.setattr("jaxkv.state.memory.available", lambda device=None, host=False: free)
    with pytest.raises(
        UserError, match=r"caches of 1 sequence.* of 64 tokens would take .* is free"
    ):
        Stream(tiny, policy, tokens=64)
    with pytest.raises(UserError, match=r"caches of 1 sequence.* would take .* is free"):
        stream.finish_prefill()
    assert not stream.prefill_finished and np.isfinite(stream.decoding.logits).all()
    monkeypatch.undo()
    stream.finish_prefill()
    assert stream.state_bytes > free


def test_an_interrupted_prefill_keeps_its_finished_chunks(tiny):
    ids = [65 + number % 26 for number in range(40)]

    def interrupt(done, total):
        if done == 32:
            raise KeyboardInterrupt

    stream, part = (Stream(tiny, "streaming:sinks=1,window=7") for _ in range(2))
    with pytest.raises(KeyboardInterrupt):
        stream.prefill([ids], chunk=16, progress=interrupt)
    part.prefill([ids[:32]], chunk=16)
    assert stream.lengths.tolist() == part.lengths.tolist() == [32]
    continued, expected = (prefilled.decode(Sampling(), 9, ())[0] for prefilled in (stream, part))
    np.testing.assert_array_equal(continued, expected)


def test_a_chunk_interrupted_between_layers_ends_the_stream(tiny, monkeypatch):
    stream = Stream(tiny, "streaming:sinks=1,window=7")
    stream.prefill([[65] * 16], chunk=16)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxkv.models.generation.streams.prefill_chunk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stream.prefill([[66] * 16], chunk=16)
    monkeypatch.undo()
    assert stream.lengths.tolist() == [16]
    for again in (lambda: stream.prefill([[66]]), lambda: stream.decode(Sampling(), 1, ())):
        with pytest.raises(UserError, match="make a new Stream"):
            again()


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {}."
TEMPORARIES = "fewer sequences, a shorter prompt, or end other programs on the device"


def raising(text):
    def run(*_):
        raise jax.errors.JaxRuntimeError(text)

    return run


@pytest.mark.parametrize(
    "text, remedy",
    [(OUT_OF_MEMORY.format("3221225472 bytes"), TEMPORARIES),
     (OUT_OF_MEMORY.format("3.00GiB"), TEMPORARIES),
     ("RESOURCE_EXHAUSTED: Attempting to allocate 3.00G. That was not possible.", TEMPORARIES),
     ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
      "Used 18.48G of 15.48G hbm. Exceeded hbm capacity by 3.00G.", TEMPORARIES),
     (OUT_OF_MEMORY.format("16 bytes"), "--weights int8, or a smaller model")],
)  # fmt: skip
def test_too_little_memory_of_the_device_is_explained(tiny, monkeypatch, text, remedy):
    stream = Stream(tiny, "streaming:sinks=1,window=7")
    monkeypatch.setattr(streams, "prefill_chunk", raising(text))
    with pytest.raises(UserError) as error:
        stream.prefill([[60, 61]])
    said = str(error.value)
    assert said.endswith(f"more; give {remedy}") and "\n" not in said
    assert said.startswith("the device is out of memory: weights take ")
    assert f"caches take {memory.show(stream.state_bytes)}" in said
    assert ("3.0 GiB more" in said) == (remedy == TEMPORARIES)


@pytest.mark.parametrize(
    "text",
    ["INTERNAL: bug",
     "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 263168, available: 232448",
     "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"],
)  # fmt: skip
def test_other_errors_of_a_device_stay_as_they_are(tiny, monkeypatch, text):
    monkeypatch.setattr(streams, "prefill_chunk", raising(text))
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        Stream(tiny, "streaming:sinks=1,window=7").prefill([[60, 61]])


def test_a_stream_is_lost_where_its_caches_are(tiny, monkeypatch, tmp_path):
    """In decode the failing program has taken the caches; a cache that grows counts its bytes."""
    stream = Stream(tiny, "full:start=8")
    stream.prefill([[60, 61]])
    failing = lambda: raising(OUT_OF_MEMORY.format("1 bytes"))
    monkeypatch.setattr(streams, "compiled_decode_block", failing)
    with pytest.raises(UserError, match=r"out of memory: weights take .*, caches take .* KiB"):
        stream.decode(Sampling(temperature=0.0), 4, ())
    for use in (lambda: stream.prefill([[62]]), lambda: stream.decode(Sampling(), 1, ())):
        with pytest.raises(UserError, match="the caches of this stream are lost"):
            use()


def test_caches_that_grow_count_as_they_were(tiny, monkeypatch):
    stream = Stream(tiny, "full:start=8")
    reserve = type(stream.policies[0]).reserve

    def refused(policy, spec, state, tokens):
        if isinstance(jax.tree.leaves(state)[0], jax.core.Tracer):
            return reserve(policy, spec, state, tokens)
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY.format("1 bytes"))

    monkeypatch.setattr(type(stream.policies[0]), "reserve", refused)
    caches = memory.show(stream.state_bytes)
    with pytest.raises(UserError, match=f"caches take {caches}"):
        stream.reserve(20)


def test_an_interrupted_wait_keeps_the_chunk(tiny, monkeypatch):
    """Ctrl-C while the device computes a chunk: it is in the caches."""
    stream = Stream(tiny, "streaming:sinks=1,window=7")

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(streams.jax, "block_until_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.prefill([[60, 61, 62]], progress=lambda *_: None)
    assert stream.lengths.tolist() == [3]
    stream.prefill([[63]])
    assert stream.lengths.tolist() == [4]


def letters(text: str, *, eos: str = "", stops=()) -> tuple[OutputText, list[str]]:
    """An `OutputText` after `text`, one letter per token, and the pieces it returned."""

    class Tokenizer:
        table, special, strip = tuple(bytes([i]) for i in range(128)), frozenset(), 0

    sequence = OutputText(SimpleNamespace(tokenizer=Tokenizer), [ord(e) for e in eos], stops)
    return sequence, [sequence.push(ord(letter)) for letter in text]


def test_text_withheld_for_a_stop_string_is_returned():
    sequence, pieces = letters("a tw", stops=["two"])
    assert pieces == ["a", " ", "", ""] and sequence.text == "a "
    assert sequence.end("length") == "tw" and (sequence.text, sequence.reason) == ("a tw", "length")
    sequence, pieces = letters("a tw.", eos=".", stops=["two"])
    assert pieces == ["a", " ", "", "", "tw"] and (sequence.text, sequence.reason) == (
        "a tw",
        "eos",
    )
    sequence, pieces = letters("a twin", stops=["two"])
    assert pieces == ["a", " ", "", "", "twi", "n"] and sequence.reason == ""


def test_an_incomplete_character_is_returned_at_the_end():
    class Tokenizer:
        table, special, strip = ("é".encode()[:1], b"x"), frozenset(), 0

    sequence = OutputText(SimpleNamespace(tokenizer=Tokenizer), [], [])
    assert sequence.push(0) == "" and sequence.end("length") == "\ufffd"


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abab", "ba"], ["aaa", "abb", "bbbb"]])
def test_stop_strings_equal_a_plain_search(stops, rng):
    """Tokens of one to three letters, against a search of the whole text after each token."""
    vocabulary = ["a", "b", "c", "ab", "ba", "bb", "aca", "cab"]

    class Tokenizer:
        table, special, strip = tuple(v.encode() for v in vocabulary), frozenset(), 0

    for _ in range(200):
        sequence, text, expected = (
            OutputText(SimpleNamespace(tokenizer=Tokenizer), [], stops),
            "",
            None,
        )
        pieces = []
        for token in rng.integers(0, len(vocabulary), 6):
            pieces.append(sequence.push(int(token)))
            if expected is None:
                text += vocabulary[token]
                starts = [text.index(stop) for stop in stops if stop in text]
                expected = text[: min(starts)] if starts else None
        assert sequence.reason == ("" if expected is None else "stop")
        pieces.append(sequence.end("length"))
        assert "".join(pieces) == sequence.text == (text if expected is None else expected)
