"""What a stream in use must keep straight: room, seals, positions, and talk that breaks off."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.streams import Stream
from jaxkv.models.text import OutputText
from jaxkv.sampling import Sampling

THINNED = "uniform:sinks=2,window=4,rounds=1,start=8"


def test_a_refused_read_leaves_the_stream_as_it_was(tiny):
    stream = Stream(tiny, "full:max=16,start=8")
    stream.prefill([list(range(2, 8))])
    with pytest.raises(UserError, match="at most 16 tokens"):
        stream.prefill([[3] * 50])
    stream.prefill([[4] * 10])
    assert stream.lengths.max() == 16
    assert np.isfinite(stream.decoding.logits).all()


def test_each_row_counts_its_own_tokens(tiny):
    """Two rows of 15 fit a maximum of 15, in whatever order their tokens came."""
    stream = Stream(tiny, "full:max=15,start=8", batch=2)
    stream.prefill([[3] * 10, [3] * 5])
    stream.prefill([[4] * 5, [4] * 10])
    assert stream.lengths.tolist() == [15, 15]


def test_layers_that_seal_and_layers_that_grow_count_apart(tiny):
    """A cache that is not sealed goes on counting from the beginning."""
    policies = (
        THINNED,
        *["full:max=64,start=8"] * (tiny.config.layers - 1),
    )
    stream = Stream(tiny, policies)
    stream.prefill([list(range(2, 30))])
    stream.finish_prefill()
    for _ in range(3):
        stream.decode(Sampling(), 8, ())
    assert stream.decoding.states[1].positions.shape[1] == 64 and stream.lengths[0] == 52
    assert np.isfinite(stream.decoding.logits).all()


def test_room_that_is_there_asks_for_no_memory(tiny, monkeypatch):
    stream = Stream(tiny, "full:max=64,start=32")
    monkeypatch.setattr("jaxkv.state.memory.available", lambda device=None, host=False: 100)
    stream.prefill([[3] * 32])
    with pytest.raises(UserError, match="only 100 bytes is free"):
        stream.prefill([[3]])


def test_a_prompt_is_sealed_once_and_what_follows_is_kept_exactly(tiny):
    stream = Stream(tiny, THINNED)
    stream.prefill([list(range(2, 34))])
    stream.finish_prefill()
    kept = np.asarray(stream.decoding.states[0].sample.positions)
    stream.prefill([[5] * 6])
    stream.finish_prefill()  # the second turn of a conversation: nothing is compressed again
    stream.prefill([[6] * 6])
    state = stream.decoding.states[0]
    np.testing.assert_array_equal(state.sample.positions, kept)
    assert kept.shape[2] == 13 and int(state.dense.count[0]) == 2 + 4 + 12


def test_a_prompt_that_one_layer_thins_is_not_said_to_be_whole(tiny, recwarn):
    """With budgets that fall from layer to layer the first may keep all, and the last does not."""
    stream = Stream(tiny, "pyramidkv:capacity=64,window=8")
    stream.prefill([[3] * 60])
    stream.finish_prefill()
    held = [int(np.isfinite(state.log_weight[0, 0]).sum()) for state in stream.decoding.states]
    assert held == [52, 2] and not recwarn
    stream = Stream(tiny, "pyramidkv:capacity=64,window=8")
    stream.prefill([[3] * 10])
    with pytest.warns(UserWarning, match="needs a prompt of at least 11 tokens, got 10"):
        stream.finish_prefill()


def test_losses_go_on_where_a_stream_stands(tiny):
    ids = list(np.random.default_rng(0).integers(2, 250, 80))
    whole = np.concatenate(list(models.losses(tiny, ids, "streaming:sinks=2,window=30")))
    stream = Stream(tiny, "streaming:sinks=2,window=30")
    stream.prefill([ids[:33]])
    rest = np.concatenate(list(models.losses(tiny, ids[33:], stream=stream)))
    np.testing.assert_allclose(rest, whole[33:], atol=1e-5)
    assert int(stream.decoding.position[0]) == 79


def test_a_policy_that_seals_cannot_be_scored_unsealed(tiny):
    with pytest.raises(UserError, match="finish_prefill"):
        models.losses(tiny, [2, 3, 4, 5], "uniform")


def test_tokens_written_without_a_penalty_are_punished_by_a_later_one(tiny):
    stream = Stream(tiny, "streaming:sinks=2,window=30")
    stream.prefill([[2, 3]])
    block, _ = stream.decode(Sampling(), 5, ())
    assert set(np.flatnonzero(stream.decoding.seen[0])) == {2, 3, *block[0].tolist()}


def test_an_answer_nobody_listens_to_the_end_of_is_part_of_the_conversation(tiny):
    talk = models.Conversation(tiny, "streaming:sinks=2,window=30")
    answer = talk.say("hello", max_new_tokens=20, ignore_eos=True)
    next(answer)
    answer.close()
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["content"] == talk.output.text


def test_text_without_end_costs_the_same_token_after_token(tiny):
    def seconds(row: OutputText, tokens: int) -> float:
        begun = time.process_time()
        for _ in range(tokens):
            row.push(40)
        return time.process_time() - begun

    row = OutputText(tiny, (), ())
    first = min(seconds(row, 2_000) for _ in range(5))
    seconds(row, 200_000)
    assert min(seconds(row, 2_000) for _ in range(5)) < 3 * first
    unheld = OutputText(tiny, (), (), keep=False)
    seconds(unheld, 1_000)
    assert unheld.count == 1_000 and not unheld.tokens and not unheld.text


def test_tables_that_do_not_fit_are_refused_before_they_are_made(tiny, monkeypatch):
    """When the stream begins, if it is told how long it gets, and when the prompt is complete."""
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
