"""The comparison with kvpress: budgets, our losses without shortcuts, and rows."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import kvpress_cases as cases
from jaxkv.evals.benchmarks import kvpress_parity as compare
from tests.tiny import write_tiny

PROMPT, SCORED = 160, 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("peers") / "model"))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 250, PROMPT + SCORED + 1).tolist()


def test_budgets_are_those_of_kvpress():
    """By hand from its formula: 30 layers, a window of 64, beta 20."""
    assert [cases.budget(1024, ratio) for ratio in cases.RATIOS] == [768, 512, 256, 128]
    assert cases.budget(10, 0.99) == 1
    half = cases.pyramid_budgets(1024, 0.5, 30)
    assert (half[0], half[-1], np.mean(half)) == (960, 64, 512)
    assert half[1] == round(960 - (960 - 64) / 29)
    assert cases.pyramid_budgets(1024, 0.25, 30)[-1] == 2 * 768 - 960
    # The last layer would get 256 / 20 tokens, less than the window.
    assert cases.pyramid_budgets(1024, 0.75, 30) == [256] * 30
    long = cases.pyramid_budgets(32_768, 0.875, 30)  # the first layer is below its cap
    assert (long[0], long[-1]) == (round(2 * 4096 - 204.8), 205)


def test_the_ends_of_a_prompt_are_kept(llm, ids):
    stream = models.Stream(llm, cases.PromptEnds(4, 16, PROMPT), tokens=len(ids))
    stream.prefill([ids[:PROMPT]])
    stream.finish_prefill()
    (policy, *_), (state, *_) = stream.policies, stream.decoding.states
    positions, weight = (np.asarray(x)[0, 0] for x in policy.cached(llm.spec, state))
    assert sorted(positions[weight == 0]) == [*range(4), *range(PROMPT - 16, PROMPT)]


@pytest.mark.parametrize("name", ["snapkv", "streaming"])
def test_the_answer_is_scored_after_its_prompt(llm, ids, name):
    policy = cases.policies(PROMPT, 0.5, 2)[name]
    cached, losses = cases.losses_of(policy, llm, ids[:PROMPT], ids[PROMPT:])
    assert cached == 80 and losses.shape == (SCORED,)
    _, full = cases.losses_of("full", llm, ids[:PROMPT], ids[PROMPT:])
    expected = np.concatenate(list(models.losses(llm, ids, "full")))[PROMPT:]
    np.testing.assert_allclose(full, expected, rtol=2e-5)
    assert np.abs(losses - full).max() > 1e-4


def test_rows_compare_text_by_text():
    """Two texts of three tokens; kvpress has no `balance`."""
    first = np.array([[80, 3, 3, 3], [81, 4, 4, 4], [80, 4, 4, 4], [160, 2, 2, 2]], float)
    jaxkv_rows = [first, first + np.array([0, 1, 1, 1])]
    kvpress_rows = [rows[[0, 2, 3]] + np.array([0, 0.5, 0.5, 2]) for rows in jaxkv_rows]
    keys = [("snapkv", 0.5), ("balance", 0.5), ("keydiff", 0.5)]
    compared = compare.table(keys, jaxkv_rows, kvpress_rows)
    case = compared["cases"]["keydiff"]["0.5"]
    assert case["losses"]["ours"] == [4, 5] and case["cached"] == {"ours": 80, "theirs": 80}
    assert case["difference"]["mean"] == -1 and case["difference"]["standard_error"] == 0
    assert case["over_full"]["ours"]["by_text"] == [2, 2]
    assert case["largest_difference_of_a_token"] == 2
    assert compared["full"]["difference"]["by_text"] == [-1, -1]
    alone = compared["cases"]["balance"]["0.5"]
    assert alone["losses"] == {"ours": [4, 5]} and alone["over_full"]["ours"]["by_text"] == [2, 2]
    assert alone["cached"] == {"ours": 81} and "difference" not in alone
