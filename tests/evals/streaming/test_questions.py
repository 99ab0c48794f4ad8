"""Questions in a stream: scores are those of the whole text, and the verdict follows the shares."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib.claim import HOLDS, NOT, PART
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
    assert tokens == len(second) - 1


def record(sinks, window):
    rows = {"4+252": sinks, "0+256": window}
    right = {
        name: {"share": 0.5 + gap, "minus_alone": gap, "standard_error": 0.01}
        for name, gap in rows.items()
    }
    return {
        "model": "a model", "questions": 300, "tokens": 9_000, "chance": 0.25,
        "right": {"alone": {"share": 0.5}} | right,
    }  # fmt: skip


@pytest.mark.parametrize(
    "sinks, window, verdict", [(-0.01, -0.2, HOLDS), (-0.01, -0.01, PART), (-0.1, -0.2, NOT)]
)
def test_the_verdict_follows_the_paired_difference(sinks, window, verdict):
    text, found = claims.streamed_questions(record(sinks, window))
    assert found == verdict and "alone 50.0%" in text
