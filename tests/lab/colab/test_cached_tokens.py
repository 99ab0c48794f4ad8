"""The tokens that a policy caches, as notebook 02 shows them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import cached_tokens, runtime


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_weights_are_added_up_by_token():
    positions = np.array([[[4, 1, 0], [2, 2, 0]]], np.uint32)
    weights = np.log([[[1, 4, 0.25], [1, 1, 1]]])
    weights[0, 0, 2] = -np.inf  # an empty slot, with position 0
    np.testing.assert_allclose(
        cached_tokens.weights_of_layer(positions, weights, 5), [[0, 4, 0, 0, 1], [1, 0, 2, 0, 0]]
    )


def test_a_phrase_is_located_in_its_tokens(llm, capsys):
    ids = runtime.passage(llm, 200)
    for words in ("Baskervilles", "who was usually", "Mr."):
        place = cached_tokens.find_tokens(llm, ids, words)
        text, fewer = (llm.tokenizer.decode(ids[place.start + n : place.stop]) for n in (0, 1))
        assert words in text and words not in fewer
        assert place == cached_tokens.find_tokens(llm, ids, words.upper().replace(" ", "  "))
    located = cached_tokens.locate_phrases(
        llm, ids, {"here": "Baskervilles", "gone": "nowhere to be found"}
    )
    assert list(located) == ["here"] and "gone: not among the first 200" in capsys.readouterr().out


@pytest.mark.slow
def test_a_window_caches_only_the_end(llm):
    ids = runtime.passage(llm, 20)
    settings = {"window": "window:window=5", "full": "full"}
    coverage = cached_tokens.measure_coverage(llm, ids, settings)
    np.testing.assert_array_equal(coverage["window"].mean, np.arange(20) >= 15)
    lines = cached_tokens.share_table(
        coverage, {"there": slice(15, 20), "gone": slice(0, 15)}
    ).text.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["window", "100%", "0%"], ["full", "100%", "100%"]
    ]  # fmt: skip
    lines = cached_tokens.size_table(coverage, settings).text.splitlines()
    assert lines[1].split()[:4] == ["window", "5", "5", "5"]
    assert lines[1].endswith("window:window=5") and lines[2].split()[:2] == ["full", "20"]
    page = cached_tokens.highlight(llm, ids, coverage, ["window"])._repr_html_()
    assert page.count("<i class=s") == 5
    beginning = cached_tokens.highlight(llm, ids[:16], coverage, ["window"])._repr_html_()
    assert beginning.count("<i class=s") == 1
    assert cached_tokens.draw_strips(coverage).png.startswith(b"\x89PNG")
