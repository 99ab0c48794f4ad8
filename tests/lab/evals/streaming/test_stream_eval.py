"""StreamEval at tiny size: where sentences stand, what counts as right, and the verdict."""

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.streaming import stream_eval
from jaxkv.evals.streaming.stream_eval import DISTANCES, EVERY, Fact, Streamed
from jaxkv.models.network import uncached
from tests.tiny import write_tiny

TOKENS = 1_800


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream_eval") / "model"
    return models.load(write_tiny(folder, max_position_embeddings=2_048))


@pytest.fixture(scope="module")
def streams(llm):
    random = np.random.default_rng(0)
    novels = [random.integers(97, 122, TOKENS).tolist() for _ in range(2)]
    return [stream_eval.stream_of(llm, ids, [0, n]) for n, ids in enumerate(novels)]


def test_every_sentence_ends_before_its_distances(llm, streams):
    for streamed in streams:
        assert len(streamed.tokens) == TOKENS and len(streamed.facts) == TOKENS // EVERY
        for number, fact in enumerate(streamed.facts, 1):
            text = llm.tokenizer.decode(streamed.tokens[EVERY * (number - 1) : EVERY * number])
            said = llm.tokenizer.decode(fact.ids)
            assert text.endswith(f"{said}.\n\n") and "The secret number of the " in said
            digits = llm.tokenizer.decode(fact.ids[fact.start :])
            assert said.endswith(f" is {digits.strip()}") and digits.strip().isdigit()
    assert streams[0].facts[0].ids != streams[1].facts[0].ids


def test_greedy_numbers_are_right_and_others_are_not(llm, streams):
    """The sentences are replaced by what a forward pass without a cache writes."""
    at, number = EVERY + 60, 3
    asked = []
    for streamed in streams:
        ids, question = streamed.tokens[:at], llm.tokenizer.encode(" It is", bos=False)
        for _ in range(number):
            decoder, hidden, _ = uncached.forward(
                llm.config, llm.weights, np.array([[*ids, *question]])
            )
            question = [*question, int(np.argmax(decoder.logits(hidden)[0, -1]))]
        asked.append(Fact(question, len(question) - number))
    wrong = asked[0]._replace(ids=[*asked[0].ids[:-1], (asked[0].ids[-1] + 1) % 256])
    questioned = [
        Streamed(streamed.tokens, [fact])
        for streamed, fact in zip(streams, (wrong, asked[1]), strict=True)
    ]
    right = stream_eval.answers(llm, questioned, "full:max=1024", [(at, 1)], at)
    assert right[:, DISTANCES.index(60)].tolist() == [0, 1]
    assert not right[:, 1:].any()


def test_a_question_leaves_the_stream_as_it_was(llm, streams):
    stream = models.Stream(llm, "streaming:sinks=4,window=60", 2)
    stream_eval.feed(stream, np.array([streamed.tokens[:130] for streamed in streams]))
    before = jax.tree.map(np.asarray, stream.decoding)
    stream_eval.correct(stream, [streamed.facts[0] for streamed in streams])
    jax.tree.map(np.testing.assert_array_equal, before, stream.decoding)
    assert stream.lengths.tolist() == [130, 130]
