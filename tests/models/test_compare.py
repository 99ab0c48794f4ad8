"""Comparisons: the recompute baseline equals its definition, and policies keep their colours."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.tools import palette, recompute
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("compare") / "tiny"))


def full(llm, ids):
    return np.concatenate(list(models.losses(llm, ids, "full:start=64,max=64", 64)))


def test_recompute_is_a_fresh_forward_for_every_token(llm, monkeypatch):
    monkeypatch.setattr(recompute, "TOKENS", 7 * 8)  # the last batch is not full
    ids = np.random.default_rng(0).integers(2, 258, 40)
    losses = np.concatenate(list(recompute.losses(llm, ids, 8)))
    expected = full(llm, ids)
    np.testing.assert_allclose(losses[:8], expected[:8], atol=1e-5)
    for target in (9, 10, 17, 25, 39):
        fresh = full(llm, ids[target - 8 : target + 1])[-1]
        np.testing.assert_allclose(losses[target - 1], fresh, atol=1e-5)


@pytest.mark.parametrize("every", [2, 31, 50])
def test_recompute_of_some_tokens_equals_that_of_all(llm, every, monkeypatch):
    monkeypatch.setattr(recompute, "TOKENS", 3 * 8)
    ids = np.random.default_rng(0).integers(2, 258, 40)
    all_losses = np.concatenate(list(recompute.losses(llm, ids, 8)))
    losses = np.concatenate(list(recompute.losses(llm, ids, 8, every)))
    chosen = np.arange(39) < 8
    chosen[8 + every - 1 :: every] = True
    np.testing.assert_array_equal(np.isfinite(losses), chosen)
    np.testing.assert_allclose(losses[chosen], all_losses[chosen], atol=1e-5)


def test_recompute_with_a_window_over_all_tokens_is_full_attention(llm):
    ids = np.random.default_rng(0).integers(2, 258, 40)
    for window in (39, 40, 1000):
        losses = np.concatenate(list(recompute.losses(llm, ids, window)))
        np.testing.assert_allclose(losses, full(llm, ids), atol=1e-5)


def test_recompute_keeps_the_window_of_the_model(tmp_path):
    folder = write_tiny(
        tmp_path / "m", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=5
    )
    llm = models.load(folder)
    ids = np.random.default_rng(0).integers(2, 258, 40)
    losses = np.concatenate(list(recompute.losses(llm, ids, 39)))
    np.testing.assert_allclose(losses, full(llm, ids), atol=1e-5)


def test_recompute_strings():
    assert recompute.window_of("window:window=256") is None
    assert recompute.window_of("recompute:window=256") == 256
    for text in ("recompute", "recompute:window=0", "recompute:sinks=4"):
        with pytest.raises(UserError, match="recompute:window=256"):
            recompute.window_of(text)


def test_every_policy_keeps_its_colour():
    policies = ["full", "window:window=8", "window:window=9", "0=full;*=window", "mine:x=1"]
    looks = palette.styles(policies)
    assert looks[0] == {"color": palette.COLOURS["full"], "linestyle": "solid"}
    assert looks[1]["color"] == looks[2]["color"] and looks[1] != looks[2]
    assert palette.styles(policies[2:3])[0] == looks[1]
    assert len({look["color"] for look in looks}) == 4
