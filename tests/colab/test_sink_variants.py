"""Small models of the notebook that trains a sink."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import runtime, sink_variants
from jaxkv.evals.training import backcopy
from jaxkv.models import compare


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of no use but to look at: of two steps."""
    folder = tmp_path_factory.mktemp("arms")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # of optax
        patch.setattr(backcopy, "LENGTH", 5_000)
        return sink_variants.train(["none", "token"], 2, seed=0, folder=folder)


def test_a_text_begins_as_its_model_expects(trained):
    found, letters = trained
    none, token = (sink_variants.held_back(found[name], letters, 9) for name in ("none", "token"))
    assert token[1:] == none and token[0] == found["token"].config.bos


def test_attention_looks_back_and_adds_up_to_one(trained):
    found, letters = trained
    (seen,) = sink_variants.maps(
        found["token"], [sink_variants.held_back(found["token"], letters, 9)]
    )
    assert seen.shape == (10, 10) and not np.triu(seen, 1).any()
    np.testing.assert_allclose(seen.sum(axis=1), 1, atol=1e-5)


def test_idle_letters_are_those_that_copy_nothing(trained):
    found, letters = trained
    share = sink_variants.share_of_first(found["token"], letters)
    assert len(share) == len(backcopy.LETTERS) - backcopy.TRIGGERS
    assert (np.diff(share) <= 0).all() and 0 <= share[-1] <= share[0] <= 1


def test_a_loss_by_place_is_that_of_reading_a_sample(trained, monkeypatch):
    """Of one sample; a sink token stands where its first letter was."""
    monkeypatch.setattr(sink_variants, "RUNS", 1)
    found, letters = trained
    for variant in found.values():
        front, sample = variant.tokenizer.front, letters.run("valid", 0, 49).tolist()
        ids = [*front, *sample[len(front) :]]
        read = np.concatenate(list(models.losses(variant, ids, "full")))
        np.testing.assert_allclose(sink_variants.loss_by_place(variant, letters), read, atol=1e-4)


@pytest.mark.parametrize("at_first, reported", [(False, (1, 1)), (True, (1, 0))])
def test_letters_look_where_they_look(trained, monkeypatch, at_first, reported):
    """Triggers look one back, others at themselves or at the first token, which may be a sink."""
    found, letters = trained
    triggers = backcopy.Chain(0).triggers

    def look(config, weights, inputs, run):
        ids = np.asarray(inputs)
        rows, count = ids.shape
        own = np.zeros(count, int) if at_first else np.arange(count)
        places = np.where(np.isin(ids, triggers), np.maximum(np.arange(count) - 1, 0), own)
        seen = np.zeros((rows, 1, count, count))
        np.put_along_axis(seen[:, 0], places[:, :, None], 1, axis=2)
        return None, None, [seen]

    monkeypatch.setattr(sink_variants.uncached, "forward", look)
    assert sink_variants.looks(found["none"], letters) == reported
    assert sink_variants.looks(found["token"], letters) == (1, 1)


def test_the_stretch_that_is_drawn_looks_most_at_its_first_token(trained, monkeypatch):
    monkeypatch.setattr(sink_variants, "STRETCHES", 9)
    variant, letters = trained[0]["token"], trained[1]
    chosen = sink_variants.most_idle(variant, letters, 7)
    shares = {
        start: sink_variants.maps(variant, [sink_variants.held_back(variant, letters, 7, start)])[
            0, :, 0
        ].mean()
        for start in range(0, 63, 7)
    }
    assert shares[chosen] == pytest.approx(max(shares.values()), abs=1e-6)


def test_an_arm_can_be_compared(trained):
    found, letters = trained
    llm, ids = found["token"], sink_variants.held_back(found["token"], letters, 40)
    names = ["full", "window:window=24"]
    scores = compare.compare(llm, ids, names, None, 0, runtime.quietly)
    results = [compare.result(llm, name, scores[name], 20) for name in names]
    assert [row["predictions"] for row in results] == [40, 40]
    assert compare.draw(results, llm.config.context, "letters").startswith(b"\x89PNG")


def test_below_its_capacity_a_cache_is_no_other(trained):
    found, letters = trained
    ids = sink_variants.held_back(found["none"], letters, 20)
    loss = sink_variants.losses(found["none"], ids, {"all": "full", "new": "window:window=24"})
    assert abs(loss["all"] - loss["new"]) < 1e-4


def test_a_table_has_a_line_for_each_arm():
    lines = sink_variants.table({"none": {"a cache": 1.5}, "token": {"a cache": 2.25}}).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "cache"],
        ["none", "1.500"],
        ["token", "2.250"],
    ]
