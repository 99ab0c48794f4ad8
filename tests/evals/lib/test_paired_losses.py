"""Paired losses: means over bins, differences of the same tokens, and records that grow."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses, parts, record
from jaxkv.evals.lib.paired_losses import BIN, Case
from tests.tiny import write_tiny

CASES = {"base": Case("streaming:sinks=1,window=15"), "few": Case("recompute:window=16", every=64)}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("paired") / "model"))


@pytest.fixture
def texts():
    random = np.random.default_rng(0)
    return {name: random.integers(2, 250, 2 * BIN + 40).tolist() for name in "ab"}


@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "TRIALS", tmp_path / "trials")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("JAXKV_COMMIT", "0123456789")
    return lambda: record.Record("paired")


def test_few_predictions_are_compared_with_the_base_at_the_same_tokens(llm, texts, trial):
    found = paired_losses.measure(llm, texts, CASES, "base", trial())
    base = paired_losses.losses_of(llm, texts["a"], CASES["base"])
    few = paired_losses.losses_of(llm, texts["a"], CASES["few"])
    assert np.isnan(few).sum() > len(few) / 2
    expected = [
        np.nanmean(few[at : at + BIN]) - base[at : at + BIN][~np.isnan(few[at : at + BIN])].mean()
        for at in (0, BIN)
    ]
    np.testing.assert_allclose(paired_losses.over(found["a"], "few", "base"), expected, rtol=1e-5)
    assert len(found["a"]["bins"]["base"]["loss"]) == 2  # whole bins


def test_a_later_run_measures_only_what_the_record_lacks(llm, texts, trial, monkeypatch):
    first = trial()
    one = paired_losses.measure(llm, {"a": texts["a"]}, CASES, "base", first)
    first.save(paired_losses.described(llm, CASES, one))
    monkeypatch.setattr(parts, "TRIALS", parts.TRIALS / "elsewhere")  # the parts are lost
    measured = []
    of = paired_losses.losses_of
    monkeypatch.setattr(
        paired_losses, "losses_of", lambda *given: measured.append(given[1]) or of(*given)
    )
    both = paired_losses.measure(llm, texts, CASES, "base", trial())
    assert measured == [texts["b"]] * len(CASES)
    np.testing.assert_allclose(both["a"]["bins"]["few"]["loss"], one["a"]["bins"]["few"]["loss"])

    other = CASES | {"base": Case("streaming:sinks=2,window=14")}
    measured.clear()
    paired_losses.measure(llm, {"a": texts["a"]}, other, "base", trial())
    assert measured == [texts["a"]]  # the case that changed


def test_rows_compare_the_bins_that_all_cases_have():
    loss = np.array([[9.0, 2.0, 3.0, 4.0], [8.0, 3.0, 4.0, 6.0]])
    by_text = {
        text: {"bins": {"base": {"loss": list(one)}, "short": {"loss": list(one[:3] + 0.5)}}}
        for text, one in zip("ab", loss, strict=True)
    }
    found = paired_losses.compare(by_text, ["base", "short"], "base", skip=BIN)
    assert found["short"]["loss_over_base"] == pytest.approx(0.5)
    assert found["short"]["standard_error"] == pytest.approx(0)
    assert found["short"]["loss"] == pytest.approx(3.5)
    assert found["base"]["perplexity"] == pytest.approx(np.exp(3))
    alone = paired_losses.compare(by_text, ["base"], "base", skip=BIN)
    assert alone["base"]["loss"] == pytest.approx(22 / 6)
