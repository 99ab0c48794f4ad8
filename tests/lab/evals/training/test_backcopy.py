"""Bigram-backcopy streams: the data, and the loss without a trained sink token."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv.evals.training.backcopy import recipe_of, train
from jaxkv.models.training import data, letters
from jaxkv.models.training.letters import LETTERS, LetterChain, write


def test_the_letter_after_a_trigger_copies_the_one_before_it():
    chain = LetterChain(0)
    stream = chain.letters(5000, 1)
    triggers = np.isin(stream, chain.triggers)
    assert 0.1 < triggers.mean() < 0.5 and not (triggers[1:] & triggers[:-1]).any()
    after_prompt = np.flatnonzero(triggers[1:-1]) + 1
    np.testing.assert_array_equal(stream[after_prompt + 1], stream[after_prompt - 1])
    assert 0 < chain.floor(stream) < np.log(len(LETTERS))


@pytest.mark.record  # colab/04_train_a_sink checks the same in CI
def test_a_trained_sink_token_is_needed_and_one_is_enough(tmp_path, monkeypatch):
    """The effect of Table 3: without the sink the loss rises, and a second sink adds nothing."""
    monkeypatch.setattr(letters, "LENGTH", 20_000)
    chain, recipe = LetterChain(0), recipe_of("token", 0)
    tokens = write(chain, tmp_path)
    assert tokens.vocab == len(LETTERS) + len(data.SPECIAL)
    ids = tokens.run("valid", 0, 6_000).tolist()
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        results = train(recipe, chain, tokens, ids, tmp_path / "run")
    loss = {name: line["loss"] for name, line in results["loss"].items()}
    floor = chain.floor(np.array(ids))
    assert loss["0+24"] > loss["1+23"] + 0.05
    assert loss["1+23"] < floor + 0.1 and abs(loss["1+23"] - loss["4+20"]) < 0.01
    assert results["first_token_most"] > 0.3
