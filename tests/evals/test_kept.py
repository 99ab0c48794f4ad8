"""What a notebook says that caches hold."""

from __future__ import annotations

import numpy as np
import pytest

import models
from evals import kept, runtime


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_weights_stand_at_their_tokens():
    positions = np.array([[[4, 1, 0], [2, 2, 0]]], np.uint32)
    weights = np.log([[[1, 4, 0.25], [1, 1, 1]]])
    weights[0, 0, 2] = -np.inf  # an empty slot, which says 0
    np.testing.assert_allclose(
        kept.of_layer(positions, weights, 5), [[0, 4, 0, 0, 1], [1, 0, 2, 0, 0]]
    )


def test_words_are_found_in_their_tokens(llm):
    ids = runtime.passage(llm, 200)
    for words in ("Baskervilles", "who was usually", "Mr."):
        place = kept.find(llm, ids, words)
        text, fewer = (llm.tokenizer.decode(ids[place.start + n : place.stop]) for n in (0, 1))
        assert words in text and words not in fewer
    with pytest.raises(ValueError):
        kept.find(llm, ids, "nowhere to be found")


def test_a_window_holds_the_end(llm):
    ids = runtime.passage(llm, 20)
    found = kept.read(llm, ids, {"window": "window:window=5", "full": "full"})
    np.testing.assert_array_equal(found["window"].mean, np.arange(20) >= 15)
    lines = kept.table(found, {"there": slice(15, 20), "gone": slice(0, 15)}).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["window", "100%", "0%"], ["full", "100%", "100%"]
    ]  # fmt: skip
    page = kept.shade(llm, ids, found, ["window"])._repr_html_()
    assert page.count("<i class=s") == 5
    assert kept.draw(found, "a caption").png.startswith(b"\x89PNG")
