"""Losses of a text: the reference perplexities, for every chunk size."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.score import Score, encode

# policy, tokens -> perplexity, from ../shared/data/README.md
REFERENCE = {
    ("full", 512): 3.7107,
    ("window:window=256", 4096): 3.6489,
    ("streaming:sinks=4,window=252", 4096): 3.6472,
    ("window:window=64", 4096): 3.8274,
    ("streaming:sinks=4,window=60", 4096): 3.9878,
    ("full", 4096): 32.824,
}
NOT_SLOW = [*REFERENCE][:2]
IN_CI = ("streaming:sinks=4,window=252", 4096)


@pytest.fixture(scope="module")
def stories(shared):
    llm = models.load(shared / "models" / "stories260K")
    text = (shared / "text" / "tinystories" / "valid.txt").read_text(encoding="utf-8")
    return llm, encode(llm, text)[:4096]


def losses(llm, tokens, policy, chunk):
    return np.concatenate(list(models.losses(llm, tokens, policy, chunk)))


def test_the_text_has_the_recorded_ids(stories, shared):
    recorded = json.loads((shared / "models" / "stories260K" / "perplexity.json").read_text())
    assert list(stories[1]) in recorded.values()


@pytest.mark.parametrize("policy, tokens", NOT_SLOW)  # the slow test below has all of them
def test_the_reference_figures(stories, policy, tokens):
    llm, ids = stories
    score = models.score(llm, ids[:tokens], policy, chunk=256)
    assert len(score.losses) == tokens - 1
    assert math.isclose(score.perplexity, REFERENCE[policy, tokens], rel_tol=1e-3)


@pytest.mark.parametrize("policy", ["full", "window:window=64", "streaming:sinks=4,window=60"])
def test_losses_token_by_token_equal_those_in_chunks(stories, policy):
    llm, ids = stories
    chunked, single = (losses(llm, ids[:200], policy, chunk) for chunk in (64, 1))
    np.testing.assert_allclose(single, chunked, atol=2e-4)


def any_chunk():
    """All pairs. CI has chunks of 256 and one policy at other chunks; the record has all."""
    for text in REFERENCE:
        for chunk in (1, 7, 4096) if text in NOT_SLOW else (1, 7, 256, 4096):
            in_ci = chunk == 256 or (text == IN_CI and chunk != 7)
            mark = pytest.mark.slow if in_ci else pytest.mark.record
            yield pytest.param(*text, chunk, marks=mark)


@pytest.mark.filterwarnings("ignore:full.*degrades")
@pytest.mark.parametrize("policy, tokens, chunk", list(any_chunk()))
def test_the_reference_figures_at_any_chunk(stories, policy, tokens, chunk, record_property):
    llm, ids = stories
    score = models.score(llm, ids[:tokens], policy, chunk)
    record_property("perplexity", score.perplexity)
    record_property("reference", REFERENCE[policy, tokens])
    assert math.isclose(score.perplexity, REFERENCE[policy, tokens], rel_tol=1e-3)


def test_losses_do_not_depend_on_the_first_position(llm):
    """Losses do not depend on the first position, also across the wrap at 2^32."""
    ids = np.random.default_rng(0).integers(2, 258, 60)
    for start in (0, 5_000_000, 2**32 - 30):
        parts = models.losses(llm, ids, "streaming:window=5", 16, start)
        actual = np.concatenate(list(parts))
        np.testing.assert_allclose(actual, losses(llm, ids, "streaming:window=5", 16), atol=1e-4)


def test_blocks(llm):
    ids = np.random.default_rng(0).integers(2, 258, 60)
    score = models.score(llm, ids, "window:window=5", 16)
    assert [(b["start"], b["end"]) for b in score.blocks(25)] == [(1, 26), (26, 51), (51, 60)]
    assert score.state_bytes == 2 * (5 * (2 * 2 * 8 * 4 + 4) + 4)


@pytest.mark.parametrize("size, rule", [(0, "at least 1"), (-1, "at least 1"), (1.5, "a whole")])
def test_sizes_of_blocks_that_are_refused(size, rule):
    score = Score("full", np.ones((1, 5), np.float32), 0, 0.0, 0.0)
    with pytest.raises(UserError, match=f"size must be {rule}.*, got {size}; use 1 or more"):
        score.blocks(size)


def test_the_mean_of_many_losses_is_exact():
    """Millions of float32 losses must not be added in float32."""
    score = Score("full", np.full((1, 5_000_000), 1.1, np.float32), 0, 0.0, 0.0)
    assert math.isclose(score.loss, float(np.float32(1.1)), rel_tol=1e-9)


def test_nan_losses_are_reported(llm):
    broken = replace(llm, weights=llm.weights | {"norm": llm.weights["norm"] * np.nan})
    with pytest.raises(UserError, match="logits that are not finite numbers"):
        models.score(broken, [2, 3, 4])


def test_invalid_arguments_are_refused(llm):
    with pytest.raises(UserError, match="start must be left out, got 5"):
        models.losses(llm, [2, 3, 4], start=5, stream=models.Stream(llm))
    with pytest.raises(UserError, match=r"start must be a whole number .* 4294967295, got -1"):
        models.losses(llm, [2, 3, 4], start=-1)
    with pytest.raises(UserError, match="at least 2 tokens, got 1"):
        models.losses(llm, [0])
    with pytest.raises(UserError, match=r"from 0 to 257, got 5\.\.300"):
        models.losses(llm, [5, 300])
    with pytest.raises(UserError, match="from 0 to 257"):
        models.Stream(llm).prefill([[5, 300]])
    with pytest.raises(UserError, match="chunk must be at least 1, got 0"):
        models.losses(llm, [0, 5], chunk=0)
