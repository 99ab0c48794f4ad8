"""Paired losses: means over bins, differences of the same tokens."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses, record
from jaxkv.evals.lib.paired_losses import BIN, Case

CASES = {"base": Case("streaming:sinks=1,window=15"), "few": Case("recompute:window=16", every=64)}


@pytest.fixture
def texts():
    random = np.random.default_rng(0)
    return {name: random.integers(2, 250, 2 * BIN + 40).tolist() for name in "ab"}


def test_few_predictions_are_compared_with_the_base_at_the_same_tokens(llm, texts, trials):
    by_text = paired_losses.measure_cases(
        llm, texts, CASES, "base", record.Record("paired", quick=True)
    )
    base = paired_losses.losses_of(llm, texts["a"], CASES["base"])
    losses = paired_losses.losses_of(llm, texts["a"], CASES["few"])
    assert np.isnan(losses).sum() > len(losses) / 2
    expected = [
        np.nanmean(losses[at : at + BIN])
        - base[at : at + BIN][~np.isnan(losses[at : at + BIN])].mean()
        for at in (0, BIN)
    ]
    gaps = paired_losses.loss_over_base(by_text["a"], "few", "base")
    np.testing.assert_allclose(gaps, expected, rtol=1e-5)
    assert len(by_text["a"]["bins"]["base"]["loss"]) == 2  # whole bins


def test_a_loss_that_is_not_finite_ends_the_run(llm, texts, monkeypatch):
    losses = np.zeros(len(texts["a"]) - 1)
    losses[-1] = np.nan
    monkeypatch.setattr(models, "losses", lambda *arguments: [losses])
    with pytest.raises(SystemExit, match="not finite"):
        paired_losses.losses_of(llm, texts["a"], CASES["base"])


def by_text(*losses):
    return {
        str(number): {
            "bins": {
                "base": {"loss": text_losses},
                "short": {"loss": [x + 0.5 for x in text_losses[:3]]},
            }
        }
        for number, text_losses in enumerate(losses)
    }


def test_rows_compare_the_bins_that_all_cases_have():
    texts = by_text([9.0, 2.0, 3.0, 4.0], [8.0, 3.0, 4.0, 6.0])
    compared = paired_losses.compare(texts, ["base", "short"], "base", skip=BIN)
    assert compared["tokens"] == [BIN, 3 * BIN]
    row = compared["rows"]["short"]
    assert row["loss_over_base"] == pytest.approx(0.5)
    assert row["standard_error"] == pytest.approx(0)
    assert row["perplexity"] == pytest.approx(np.exp(3.5))
    assert compared["rows"]["base"]["perplexity"] == pytest.approx(np.exp(3))
    alone = paired_losses.compare(texts, ["base"], "base", skip=BIN)
    assert alone["rows"]["base"]["perplexity"] == pytest.approx(np.exp(22 / 6))
    first = paired_losses.compare(texts, ["base"], "base", skip=0, end=BIN)
    assert first["rows"]["base"]["perplexity"] == pytest.approx(np.exp(8.5))
