"""Questions in a stream: scores are those of the whole text, and the verdict follows the shares."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib.claim import HOLDS, NOT, OPEN, PART, UNSEEN
from jaxkv.evals.streaming import claims, questions
from tests.tiny import write_tiny

ASKED = [
    {"context": "the cat", "choices": [" sat", " over the hill", " ran"], "answer": 1},
    {"context": "the dog", "choices": [" on a mat", " dog"], "answer": 0},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("questions") / "model"))


def test_a_question_follows_the_earlier_ones_and_their_right_answers(llm, monkeypatch):
    seen, of = [], questions.likelihood
    monkeypatch.setattr(questions, "likelihood", lambda *given: seen.append(of(*given)) or seen[-1])
    right, tokens = questions.right_in_stream(llm, ASKED, "full:max=128")
    encode = lambda text: llm.tokenizer.encode(text, bos=False)  # noqa: E731
    front = list(llm.tokenizer.front) or encode("\n\n")
    first = [*front, *encode("the cat")]
    second = [*first, *encode(" over the hill"), *encode("\n\n"), *encode("the dog")]
    expected = []
    for before, one in zip((first, second), ASKED, strict=True):
        for choice in map(encode, one["choices"]):
            losses = np.concatenate(list(models.losses(llm, [*before, *choice], "full:max=128")))
            expected.append(-losses[-len(choice) :].mean())
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    assert right.tolist() == [int(np.argmax(expected[:3])) == 1, int(np.argmax(expected[3:])) == 0]
    assert tokens.tolist() == [
        len(ids) + max(len(encode(choice)) for choice in one["choices"])
        for ids, one in zip((first, second), ASKED, strict=True)
    ]


def test_the_last_tokens_are_read_again(llm, monkeypatch):
    seen, of = [], questions.likelihood
    monkeypatch.setattr(questions, "likelihood", lambda *given: seen.append(of(*given)) or seen[-1])
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
    found = questions.run(llm, ASKED * 2)
    assert found["questions"] == 4 and found["questions_of_full"] == 1
    for name in questions.POLICIES:
        minus = found["right"][name]["minus"]
        assert minus["full"]["standard_error"] is None
        share = found["right"][name]["share"]
        assert minus["reread"]["mean"] == share - found["right"]["reread"]["share"]
        assert minus["alone"]["mean"] == share - found["right"]["alone"]["share"]


def record(sinks, window, full=0.95):
    gap = lambda mean: {"mean": mean, "standard_error": 0.01}  # noqa: E731
    right = {
        name: {"share": 0.9 + mean, "minus": dict.fromkeys(("full", "reread", "alone"), gap(mean))}
        for name, mean in {"4+252": sinks, "0+256": window}.items()
    }
    others = {name: {"share": full} for name in ("full", "reread", "alone")}
    return {
        "model": "a model", "questions": 300, "questions_of_full": 240, "tokens": 9_000,
        "reread": 252, "chance": 0.25, "right": others | right,
    }  # fmt: skip


@pytest.mark.parametrize(
    "sinks, window, full, verdict",
    [(-0.01, -0.2, 0.95, HOLDS), (-0.01, -0.01, 0.95, PART), (-0.1, -0.2, 0.95, NOT),
     (-0.01, -0.2, 0.6, UNSEEN)],
)  # fmt: skip
def test_the_verdict_follows_the_paired_differences(sinks, window, full, verdict):
    text, found = claims.streamed_questions(record(sinks, window, full))
    assert found == verdict and ("below the gate" in text) == (full < 0.9)
    assert f"4+252 {0.9 + sinks:.1%} (minus full {sinks:+.1%} ± 2.0%" in text


def test_a_record_without_the_controls_decides_nothing():
    given = record(0, 0)
    del given["right"]["full"]
    assert claims.streamed_questions(given)[1].startswith(OPEN)
