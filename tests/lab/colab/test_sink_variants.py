"""Small models of the notebook that trains a sink."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import runtime, sink_variants
from jaxkv.evals.training import backcopy
from jaxkv.models.tools import compare


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models after two training steps."""
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # of optax
        patch.setattr(backcopy, "LENGTH", 5_000)
        return sink_variants.train(["none", "token"], 2, seed=0, folder=folder)


@pytest.mark.slow
def test_a_text_begins_with_the_sink_token_of_its_model(trained):
    variants, letters = trained
    none, token = (sink_variants.held_out(variants[name], letters, 9) for name in ("none", "token"))
    assert token[1:] == none and token[0] == variants["token"].config.bos


@pytest.mark.slow
def test_attention_is_causal_and_sums_to_one(trained):
    variants, letters = trained
    (seen,) = sink_variants.attention_maps(
        variants["token"], [sink_variants.held_out(variants["token"], letters, 9)]
    )
    assert seen.shape == (10, 10) and not np.triu(seen, 1).any()
    np.testing.assert_allclose(seen.sum(axis=1), 1, atol=1e-5)


@pytest.mark.slow
def test_every_letter_that_is_no_trigger_is_idle(trained):
    variants, letters = trained
    share = sink_variants.first_token_attention(variants["token"], letters)
    assert len(share) == len(backcopy.LETTERS) - backcopy.TRIGGERS
    assert (np.diff(share) <= 0).all() and 0 <= share[-1] <= share[0] <= 1


@pytest.mark.slow
def test_the_loss_by_position_is_that_of_one_sample_with_its_sink_token(trained, monkeypatch):
    monkeypatch.setattr(sink_variants, "RUNS", 1)
    variants, letters = trained
    for variant in variants.values():
        front, sample = variant.tokenizer.front, letters.run("valid", 0, 49).tolist()
        ids = [*front, *sample[len(front) :]]
        read = np.concatenate(list(models.losses(variant, ids, "full")))
        np.testing.assert_allclose(
            sink_variants.loss_by_position(variant, letters), read, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("at_first, reported", [(False, (1, 1)), (True, (1, 0))])
def test_mean_attention_of_triggers_and_other_letters(trained, monkeypatch, at_first, reported):
    """Triggers attend to the letter before, others to themselves or the first token."""
    variants, letters = trained
    triggers = backcopy.LetterChain(0).triggers

    def look(config, weights, inputs, run):
        ids = np.asarray(inputs)
        rows, count = ids.shape
        positions = np.zeros(count, int) if at_first else np.arange(count)
        places = np.where(np.isin(ids, triggers), np.maximum(np.arange(count) - 1, 0), positions)
        seen = np.zeros((rows, 1, count, count))
        np.put_along_axis(seen[:, 0], places[:, :, None], 1, axis=2)
        return None, None, [seen]

    monkeypatch.setattr(sink_variants.uncached, "forward", look)
    assert sink_variants.mean_attention(variants["none"], letters) == reported
    assert sink_variants.mean_attention(variants["token"], letters) == (1, 1)


@pytest.mark.slow
def test_the_drawn_stretch_attends_most_to_its_first_token(trained, monkeypatch):
    monkeypatch.setattr(sink_variants, "STRETCHES", 9)
    variant, letters = trained[0]["token"], trained[1]
    chosen = sink_variants.find_idle_stretch(variant, letters, 7)
    shares = {
        start: sink_variants.attention_maps(
            variant, [sink_variants.held_out(variant, letters, 7, start)]
        )[0, :, 0].mean()
        for start in range(0, 63, 7)
    }
    assert shares[chosen] == pytest.approx(max(shares.values()), abs=1e-6)


@pytest.mark.slow
def test_a_variant_can_be_compared(trained):
    variants, letters = trained
    llm, ids = variants["token"], sink_variants.held_out(variants["token"], letters, 40)
    names = ["full", "window:window=24"]
    scores = compare.compare(llm, ids, names, None, 0, runtime.no_progress)
    results = [compare.result(llm, name, scores[name], 20) for name in names]
    assert [row["predictions"] for row in results] == [40, 40]
    assert compare.draw(results, llm.config.context, "letters").startswith(b"\x89PNG")


@pytest.mark.slow
def test_below_its_capacity_a_window_equals_full_attention(trained):
    variants, letters = trained
    ids = sink_variants.held_out(variants["none"], letters, 20)
    loss = sink_variants.losses(variants["none"], ids, {"all": "full", "new": "window:window=24"})
    assert abs(loss["all"] - loss["new"]) < 1e-4


def test_the_table_has_a_line_for_each_variant():
    lines = sink_variants.loss_table(
        {"none": {"a cache": 1.5}, "token": {"a cache": 2.25}}
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "cache"],
        ["none", "1.500"],
        ["token", "2.250"],
    ]
