"""Streams of facts and questions: their properties, and equal answers below capacity."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import facts as streams
from jaxkv.evals.lib.facts import FIRST_LETTER, FIRST_NAME
from jaxkv.evals.reservoir import recall
from jaxkv.models.training import data, training
from jaxkv.models.training.export import export
from jaxkv.models.training.pretrain import setting_of

STREAM = streams.stream(60_000, 3)
SEEDS = [(0, row) for row in range(24)]


def test_a_name_is_asked_before_it_has_another_value():
    said, distances = {}, []
    for at, (before, fact) in enumerate(pairwise(STREAM)):
        if fact >= FIRST_NAME:
            continue
        name = fact // streams.VALUES
        if name in said:
            asked, last_fact, times_left = said.pop(name)
            assert before == FIRST_NAME + name and last_fact == fact
            distances.append(at - asked)
        else:
            assert not FIRST_NAME <= before < FIRST_LETTER
            times_left = streams.TIMES
        if times_left > 1:
            said[name] = at + 1, fact, times_left - 1
    assert len(distances) > 10_000
    assert min(distances) < 6 and streams.FARTHEST <= max(distances) < recall.CONTEXT
    assert 0.1 < np.mean(np.array(distances) > 256) < 0.5


@pytest.mark.parametrize("facts", [True, False])
def test_each_asked_fact_occurs_once_at_its_distance(facts):
    distances = (1, 16, 129, 384)
    for row in range(20):
        prompt, facts_asked = streams.question(500, distances, (1, row), facts)
        assert len(prompt) == 500 and len({fact // streams.VALUES for fact in facts_asked}) == 4
        for distance, fact in zip(distances, facts_asked, strict=True):
            name = fact // streams.VALUES
            of_name = [
                x in (FIRST_NAME + name, fact) or x // streams.VALUES == name for x in prompt
            ]
            assert [i for i, x in enumerate(of_name) if x] == [500 - distance]
            assert prompt[500 - distance] == fact
        assert (sum(x < FIRST_LETTER for x in prompt) == 4) != facts


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Random weights, large enough for attention to matter."""
    folder = tmp_path_factory.mktemp("recall")
    tokens = streams.write(folder / "data", documents=4, length=3_000)
    setting = setting_of(recall.recipe_of(seed=0, steps=1), tokens)
    weights = {n: 8 * w if w.ndim > 1 else w for n, w in training.begin(setting).weights.items()}
    tokenizer = tokens.folder / data.TOKENIZER
    export(folder / "hf", setting.config, weights, tokenizer, setting.front, "float32")
    return models.load(folder / "hf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*all its tokens stay in the cache")
def test_below_capacity_all_policies_answer_alike(llm):
    """A sink token, 60 tokens and 2 more: below every capacity and every compressed length."""
    asked = [streams.question(60, (16, 5), (0, row)) for row in range(24)]
    prompts, facts_asked = zip(*asked, strict=True)
    expected, _ = recall.answers(llm, "full", prompts, facts_asked, SEEDS)
    assert len(set(expected.flatten().tolist())) > 3
    # Each question starts from the same state.
    later, _ = recall.answers(llm, "full", prompts, [facts[1:] for facts in facts_asked], SEEDS)
    np.testing.assert_array_equal(later[:, 0], expected[:, 1])
    # Of the compressing policies, only snapkv keeps more than the ends of such a short prompt.
    all_of = recall.POLICIES | recall.COMPRESSED
    for name in ("streaming", "balance-stream", "snapkv"):
        said, _ = recall.answers(llm, all_of[name], prompts, facts_asked, SEEDS)
        np.testing.assert_array_equal(said, expected, err_msg=name)


@pytest.mark.slow
def test_prompts_are_compressed_to_equal_numbers_of_tokens(llm):
    prompt, _ = streams.question(recall.LENGTH_WITHIN, (16,), (0, 0))
    for name, text in recall.COMPRESSED.items():
        stream = models.Stream(llm, text)
        stream.prefill([[*llm.tokenizer.front, *prompt]], recall.CHUNK)
        stream.finish_prefill()
        held = zip(stream.policies, stream.decoding.states, strict=True)
        kept = [
            np.asarray(policy.cached(llm.spec, state).log_weight) > -np.inf
            for policy, state in held
        ]
        assert sum(k.sum() for k in kept) == recall.LEFT * sum(k.shape[1] for k in kept), name


@pytest.mark.slow
def test_a_fact_beyond_the_window_does_not_change_its_answer(llm):
    """It does change the answer of full attention."""
    asked = [streams.question(90, (70,), (0, row)) for row in range(24)]
    prompts, facts_asked = zip(*asked, strict=True)
    changed = [[*p[:20], *streams.letters(np.random.default_rng(1), 1), *p[21:]] for p in prompts]
    assert all(
        p[20] == facts[0] != o[20]
        for p, o, facts in zip(prompts, changed, facts_asked, strict=True)
    )
    for text, is_equal in (("window:window=24", True), ("full", False)):
        answers = [
            recall.answers(llm, text, variant, facts_asked, SEEDS)[0]
            for variant in (prompts, changed)
        ]
        assert np.array_equal(*answers) == is_equal


def test_accuracy_is_the_share_of_right_answers(llm, monkeypatch):
    def answers(llm, text, prompts, facts_asked, seeds):
        wrong = np.array([[row % 4 == 0, row % 2 == 0] for _, row in seeds])
        return np.array(facts_asked) + wrong, 7

    monkeypatch.setattr(recall, "answers", answers)
    by_policy = recall.accuracy(llm, {"full": "full"}, [16, 32], 60, rows=40, seed=5)
    right = {"16": 0.75, "32": 0.5}
    assert by_policy["full"] == {"policy": "full", "right": right, "state_bytes": 7}


def test_only_policies_within_the_trained_context_read_longer_streams(llm):
    assert set(recall.POLICIES) - set(recall.endless(llm)) == {"full", "h2o"}
