"""Questions in a stream: scores are those of the whole text."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.streaming import questions

ASKED = [
    {"context": "the cat", "choices": [" sat", " over the hill", " ran"], "answer": 1},
    {"context": "the dog", "choices": [" on a mat", " dog"], "answer": 0},
]


@pytest.fixture
def seen(monkeypatch):
    """The likelihoods of all choices, in their order."""
    means, likelihood = [], questions.likelihood
    listen = lambda *arguments: means.append(likelihood(*arguments)) or means[-1]
    monkeypatch.setattr(questions, "likelihood", listen)
    return means


def encode(llm, *texts):
    return [i for text in texts for i in llm.tokenizer.encode(text, bos=False)]


def front(llm):
    return list(llm.tokenizer.front) or encode(llm, "\n\n")


def expected(llm, before, question):
    """The mean log-likelihoods of the choices, from the losses of the whole text."""
    means = []
    for choice in question["choices"]:
        ids = encode(llm, choice)
        losses = np.concatenate(list(models.losses(llm, [*before, *ids], "full:max=128")))
        means.append(-losses[-len(ids) :].mean())
    return means


def test_a_question_follows_the_earlier_ones_and_their_right_answers(llm, seen):
    right, tokens = questions.right_in_stream(llm, ASKED, "full:max=128")
    first = [*front(llm), *encode(llm, "the cat")]
    second = [*first, *encode(llm, " over the hill", "\n\n", "the dog")]
    means = [expected(llm, *pair) for pair in zip((first, second), ASKED, strict=True)]
    np.testing.assert_allclose(seen, [mean for question in means for mean in question], rtol=1e-5)
    assert right.tolist() == [int(np.argmax(means[0])) == 1, int(np.argmax(means[1])) == 0]
    longest = [max(len(encode(llm, x)) for x in question["choices"]) for question in ASKED]
    assert tokens.tolist() == [len(first) + longest[0], len(second) + longest[1]]


def test_the_last_tokens_are_read_again(llm, seen):
    questions.right_in_stream(llm, ASKED, "full:max=128", reread=12)
    stream = encode(llm, "the cat", " over the hill", "\n\n", "the dog")
    before = [*front(llm), *stream][-12:]
    np.testing.assert_allclose(seen[3:], expected(llm, before, ASKED[1]), rtol=1e-5)
