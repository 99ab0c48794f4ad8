"""The comparison with kvpress: budgets, our losses without shortcuts, and rows."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import kvpress_cases as cases
from jaxkv.evals.benchmarks import kvpress_parity as compare

PROMPT, SCORED = 160, 8


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
    stream = models.Stream(llm, cases.PromptEnds(4, 16), tokens=len(ids))
    stream.prefill([ids[:PROMPT]])
    stream.finish_prefill()
    (policy, *_), (state, *_) = stream.policies, stream.decoding.states
    positions, weight = (np.asarray(x)[0, 0] for x in policy.cached(llm.spec, state))
    assert sorted(positions[weight == 0]) == [*range(4), *range(PROMPT - 16, PROMPT)]


@pytest.mark.parametrize("name", ["snapkv", "streaming"])
def test_the_answer_is_scored_after_its_prompt(llm, ids, name):
    named = [(name, cases.policies(PROMPT, 0.5, 2)[name]), ("full", "full")]
    (cached, losses, _, kept), (_, full, hits, _) = cases.rows_of(
        llm, named, ids[:PROMPT], ids[PROMPT:]
    )
    assert cached == 80 and losses.shape == (SCORED,)
    assert np.unpackbits(kept, axis=-1).sum(-1).tolist() == [[80] * llm.spec.kv_heads] * 2
    stream = models.Stream(llm, "full")
    stream.prefill([ids[: PROMPT + 1]])
    for token, hit in zip(ids[PROMPT + 1 :], hits, strict=True):
        assert (int(np.argmax(stream.decoding.logits[0])) == token) == hit
        stream.prefill([[token]])
    expected = np.concatenate(list(models.losses(llm, ids, "full")))[PROMPT:]
    np.testing.assert_allclose(full, expected, rtol=2e-5)
    assert np.abs(losses - full).max() > 1e-4


def test_a_shared_reading_changes_nothing(llm, ids):
    by_name = cases.policies(PROMPT, 0.5, 2)
    named = [(name, by_name[name]) for name in ("tova", "streaming", cases.ADAPTIVE, "uniform")]
    together = cases.rows_of(llm, named, ids[:PROMPT], ids[PROMPT:])
    for case, row in zip(named, together, strict=True):
        (alone,) = cases.rows_of(llm, [case], ids[:PROMPT], ids[PROMPT:])
        np.testing.assert_array_equal(row.kept, alone.kept)
        np.testing.assert_allclose(row.losses, alone.losses, rtol=1e-5)


def test_kvzip_keeps_the_largest_scores_of_all_layers(llm, ids):
    """Beside the sinks, as kvpress does, which removes the smallest of the model."""
    named = [("kvzip", cases.policies(PROMPT, 0.5, 2)["kvzip"])]
    (row,) = cases.rows_of(llm, named, ids[:PROMPT], ids[PROMPT:])
    scores = cases.model_rows.scores(llm, "kvzip", tuple(ids[:PROMPT]))
    scores[:, :, : cases.SINKS] = 2
    kept = np.unpackbits(row.kept, axis=-1)[..., :PROMPT].astype(bool)
    count = cases.budget(PROMPT, 0.5) * scores.shape[0] * scores.shape[1]
    assert kept.sum() == count and scores[kept].min() >= scores[~kept].max()


def row(cached: float, loss: float, *kept: int) -> cases.CaseRow:
    """Three scored tokens, the last of which are hits; kept tokens of eight, in one KV head."""
    bits = np.isin(np.arange(8), kept)[None, None]
    hits = np.array([loss < 4, True, True])
    return cases.CaseRow(cached, np.full(3, loss), hits, np.packbits(bits, axis=-1))


def test_rows_compare_text_by_text():
    """Two texts of three tokens; kvpress has no `balance`."""
    texts = [
        [row(80, loss, 0, 1), row(81, loss + 1, 2), row(80, loss + 1, 3, 4, 5), row(160, loss - 1)]
        for loss in (3.0, 4.0)
    ]
    jaxkv_rows = list(map(cases.stored, texts))
    kvpress_rows = [
        cases.stored([
            row(80, first.losses[0] + 0.5, 0, 7), row(80, third.losses[0] + 0.5, 3, 4, 6),
            row(160, full.losses[0] + 2),
        ]) for first, _, third, full in texts
    ]  # fmt: skip
    for line in kvpress_rows:
        line["losses"][:2] -= np.float64(line is kvpress_rows[0]) * 0.5
    keys = [("snapkv", 0.5), ("balance", 0.5), ("keydiff", 0.5)]
    compared = compare.table(keys, jaxkv_rows, kvpress_rows, [3, 2])
    case = compared["cases"]["keydiff"]["0.5"]
    assert case["losses"]["ours"] == [4, 5] and case["cached"] == {"ours": 80, "theirs": 80}
    assert case["difference"]["by_text"] == [0, -0.5]
    assert case["over_full"]["ours"]["by_text"] == [2, 2]
    assert case["largest_difference_of_a_token"] == 0.5
    assert case["overlap"] == [2 / 3, 2 / 3]
    assert case["right"] == {"ours": 1, "theirs": 1} and case["samples"] == 2
    assert compared["cases"]["snapkv"]["0.5"]["right"] == {"ours": 2, "theirs": 2}
    assert compared["full"]["difference"]["by_text"] == [-2, -2]
    alone = compared["cases"]["balance"]["0.5"]
    assert alone["losses"] == {"ours": [4, 5]} and alone["over_full"]["ours"]["by_text"] == [2, 2]
    assert alone["cached"] == {"ours": 81} and "difference" not in alone
    assert "right" not in compare.table(keys, jaxkv_rows, kvpress_rows, [0, 0])["full"]
