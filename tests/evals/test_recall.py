"""Streams of facts and questions: what they promise, and that a whole cache answers alike."""

from __future__ import annotations

import numpy as np
import pytest

import models
from evals import recall
from evals.recall import FACT, FIRST_LETTER, FIRST_NAME, FIRST_VALUE, QUESTION
from models import data, training
from models.hf.export import export
from models.pretrain import setting_of

STREAM = recall.stream(60_000, 3)


def stated(stream):
    """Each fact and question: which mark, where its name stands, the name, the value."""
    found = np.array(stream)
    (marks,) = np.nonzero(found < FIRST_NAME)
    marks = marks[marks < len(found) - 2]
    return [(int(found[i]), int(i) + 1, int(found[i + 1]), int(found[i + 2])) for i in marks]


def test_each_question_has_one_answer_within_what_is_trained():
    said, asked = {}, []
    for mark, at, name, value in stated(STREAM):
        assert FIRST_NAME <= name < FIRST_VALUE <= value < FIRST_LETTER
        if mark == FACT:
            assert name not in said  # it is not said anew while a question is open
            said[name] = at, value
        else:
            begun, answer = said.pop(name)
            assert answer == value
            asked.append(at - begun)
    assert len(asked) > 5_000
    assert min(asked) < 8 and recall.FARTHEST <= max(asked) < recall.CONTEXT
    assert 0.1 < np.mean(np.array(asked) > 256) < 0.5


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("distance", [16, 129, 384])
def test_a_question_is_answered_once_so_far_back(distance, facts):
    for row in range(20):
        prompt, value = recall.question(500, distance, (1, distance, row), facts)
        assert len(prompt) == 500 and prompt[-2] == QUESTION
        (found,) = [i for i in range(499) if prompt[i] == prompt[-1]]
        assert found == 499 - distance
        assert prompt[found - 1] == FACT and prompt[found + 1] == value
        others = [x for i, x in enumerate(prompt[:-2]) if not found - 1 <= i <= found + 1]
        assert facts or min(others) >= FIRST_LETTER


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Fresh weights, made large enough for attention to matter."""
    folder = tmp_path_factory.mktemp("recall")
    tokens = recall.write(folder / "data", documents=4, length=3_000)
    setting = setting_of(recall.recipe_of(seed=0, steps=1), tokens)
    weights = {n: 8 * w if w.ndim > 1 else w for n, w in training.begin(setting).weights.items()}
    tokenizer = tokens.folder / data.TOKENIZER
    export(folder / "hf", setting.config, weights, tokenizer, setting.front, "float32")
    return models.load(folder / "hf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*it is kept whole")
def test_a_prompt_that_fits_is_answered_alike_by_all(llm):
    """A sink token, 60 and 2 more: less than any cache holds, and than any of them thins."""
    prompts = [recall.question(60, 16, (0, row))[0] for row in range(24)]
    wanted = list(recall.answers(llm, "full", prompts))
    assert len(set(wanted)) > 3
    # These thin whatever is longer than its ends; pyramidkv in its last layers.
    shorter = ("balance:", "uniform:", "pyramidkv:")
    for text in recall.POLICIES.values():
        if not text.startswith(shorter):
            assert list(recall.answers(llm, text, prompts)) == wanted, text


def test_a_fact_beyond_the_window_changes_no_answer_of_it(llm):
    """And does change that of full attention: the question is asked of the cache alone."""
    prompts = [recall.question(90, 70, (0, row))[0] for row in range(24)]
    other = [[*p[:19], *recall.letters(np.random.default_rng(1), 3), *p[22:]] for p in prompts]
    assert all(p[18:21] != o[18:21] for p, o in zip(prompts, other, strict=True))
    for text, same in (("window:window=24", True), ("full", False)):
        found = [list(recall.answers(llm, text, asked)) for asked in (prompts, other)]
        assert (found[0] == found[1]) == same


def test_accuracy_is_the_share_of_right_answers(llm, monkeypatch):
    monkeypatch.setattr(recall, "answers", lambda llm, text, prompts: (
        recall.question(60, 16, (5, 16, row))[1] + (row % 4 == 0) for row in range(len(prompts))
    ))  # fmt: skip
    found = recall.accuracy(llm, {"full": "full"}, [16], 60, rows=40, seed=5)
    assert found["full"]["right"] == {"16": 0.75}


def test_only_caches_that_stay_within_the_trained_context_go_beyond_it(llm):
    assert set(recall.POLICIES) - set(recall.endless(llm)) == {
        *("full", "balance", "uniform", "snapkv", "pyramidkv", "h2o")
    }
