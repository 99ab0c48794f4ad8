"""Small models of the notebook that trains a sink."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from evals import arms, backcopy


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of no use but to look at: of two steps."""
    folder = tmp_path_factory.mktemp("arms")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # of optax
        patch.setattr(backcopy, "LENGTH", 5_000)
        return arms.train(["none", "token"], 2, seed=0, folder=folder)


def test_a_text_begins_as_its_model_expects(trained):
    found, letters = trained
    none, token = (arms.held_back(found[name], letters, 9) for name in ("none", "token"))
    assert token[1:] == none and token[0] == found["token"].llm.config.bos


def test_attention_looks_back_and_adds_up_to_one(trained):
    found, letters = trained
    seen = arms.attention(found["token"], arms.held_back(found["token"], letters, 9))
    assert seen.shape == (10, 10) and not np.triu(seen, 1).any()
    np.testing.assert_allclose(seen.sum(axis=1), 1, atol=1e-5)


def test_idle_letters_are_those_that_copy_nothing(trained):
    found, letters = trained
    share = arms.share_of_first(found["token"], letters)
    assert len(share) == len(backcopy.LETTERS) - backcopy.TRIGGERS
    assert (np.diff(share) <= 0).all() and 0 <= share[-1] <= share[0] <= 1


def test_below_its_capacity_a_cache_is_no_other(trained):
    found, letters = trained
    ids = arms.held_back(found["none"], letters, 20)
    loss = arms.losses(found["none"], ids, ["full", "window:window=24"])
    assert abs(loss["full"] - loss["window:window=24"]) < 1e-4


def test_a_table_has_a_line_for_each_arm():
    lines = arms.table({"none": {"a cache": 1.5}, "token": {"a cache": 2.25}}).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "cache"],
        ["none", "1.500"],
        ["token", "2.250"],
    ]
