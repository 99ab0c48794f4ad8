"""Questions in a stream: scores are those of the whole text."""

import numpy as np

from jaxkv import models
from jaxkv.evals.streaming import questions

ASKED = [
    {"context": "the cat", "choices": [" sat", " over the hill", " ran"], "answer": 1},
    {"context": "the dog", "choices": [" on a mat", " dog"], "answer": 0},
]


def test_a_question_follows_the_earlier_ones_and_their_right_answers(llm, monkeypatch):
    seen, likelihood = [], questions.likelihood
    monkeypatch.setattr(
        questions, "likelihood", lambda *arguments: seen.append(likelihood(*arguments)) or seen[-1]
    )
    right, tokens = questions.right_in_stream(llm, ASKED, "full:max=128")
    encode = lambda text: llm.tokenizer.encode(text, bos=False)  # noqa: E731
    front = list(llm.tokenizer.front) or encode("\n\n")
    first = [*front, *encode("the cat")]
    second = [*first, *encode(" over the hill"), *encode("\n\n"), *encode("the dog")]
    expected = []
    for before, question in zip((first, second), ASKED, strict=True):
        for choice in map(encode, question["choices"]):
            losses = np.concatenate(list(models.losses(llm, [*before, *choice], "full:max=128")))
            expected.append(-losses[-len(choice) :].mean())
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    assert right.tolist() == [int(np.argmax(expected[:3])) == 1, int(np.argmax(expected[3:])) == 0]
    assert tokens.tolist() == [
        len(ids) + max(len(encode(choice)) for choice in question["choices"])
        for ids, question in zip((first, second), ASKED, strict=True)
    ]


def test_the_last_tokens_are_read_again(llm, monkeypatch):
    seen, likelihood = [], questions.likelihood
    monkeypatch.setattr(
        questions, "likelihood", lambda *arguments: seen.append(likelihood(*arguments)) or seen[-1]
    )
    questions.right_in_stream(llm, ASKED, "full:max=128", reread=12)
    encode = lambda text: llm.tokenizer.encode(text, bos=False)  # noqa: E731
    front = list(llm.tokenizer.front) or encode("\n\n")
    stream = [*front, *encode("the cat"), *encode(" over the hill"), *encode("\n\n")]
    before = [*stream, *encode("the dog")][-12:]
    expected = []
    for choice in map(encode, ASKED[1]["choices"]):
        losses = np.concatenate(list(models.losses(llm, [*before, *choice], "full:max=128")))
        expected.append(-losses[-len(choice) :].mean())
    np.testing.assert_allclose(seen[3:], expected, rtol=1e-5)


def test_a_run_pairs_each_stream_with_the_controls(llm, monkeypatch):
    monkeypatch.setattr(questions, "MOST", 30)  # the first question alone fits
    results = questions.answered(llm, ASKED * 2)
    assert results["questions"] == 4 and results["questions_of_full"] == 1
    for name in questions.POLICIES:
        minus = results["right"][name]["minus"]
        assert minus["full"]["standard_error"] is None
        share = results["right"][name]["share"]
        assert minus["reread"]["mean"] == share - results["right"]["reread"]["share"]
        assert minus["alone"]["mean"] == share - results["right"]["alone"]["share"]
