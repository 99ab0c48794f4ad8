"""Paired losses: means over bins, differences of the same tokens, and records that grow."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses, parts, record
from jaxkv.evals.lib.paired_losses import BIN, Case

CASES = {"base": Case("streaming:sinks=1,window=15"), "few": Case("recompute:window=16", every=64)}


@pytest.fixture
def texts():
    random = np.random.default_rng(0)
    return {name: random.integers(2, 250, 2 * BIN + 40).tolist() for name in "ab"}


@pytest.fixture
def trial(tmp_path, monkeypatch, llm):
    """Opens the record of a run on texts whose files have these contents."""
    monkeypatch.setattr(parts, "TRIALS", tmp_path / "trials")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("JAXKV_COMMIT", "0123456789")

    def begin(**contents):
        for name, content in contents.items():
            (tmp_path / f"{name}.txt").write_text(content)
        started = record.Record("paired", [tmp_path / f"{name}.txt" for name in contents])
        started.about["data"][f"{llm.name}.gguf"] = "0"
        return started

    return begin


def test_few_predictions_are_compared_with_the_base_at_the_same_tokens(llm, texts, trial):
    by_text = paired_losses.measure_cases(llm, texts, CASES, "base", trial(a="a", b="b"))
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


def test_a_later_run_measures_only_what_the_record_lacks(llm, texts, trial, monkeypatch):
    first = trial(a="a")
    by_text = paired_losses.measure_cases(llm, {"a": texts["a"]}, CASES, "base", first)
    first.save(paired_losses.record_header(llm, CASES, by_text))
    monkeypatch.setattr(parts, "TRIALS", parts.TRIALS / "elsewhere")  # the parts are lost
    measured = []
    losses_of = paired_losses.losses_of
    monkeypatch.setattr(
        paired_losses,
        "losses_of",
        lambda *arguments: measured.append(arguments[1:]) or losses_of(*arguments),
    )
    extended = paired_losses.measure_cases(llm, texts, CASES, "base", trial(a="a", b="b"))
    assert [text for text, _ in measured] == [texts["b"]] * len(CASES)
    np.testing.assert_allclose(
        extended["a"]["bins"]["few"]["loss"], by_text["a"]["bins"]["few"]["loss"]
    )

    def cases_again(cases, content):
        measured.clear()
        paired_losses.measure_cases(llm, {"a": texts["a"]}, cases, "base", trial(a=content))
        return [case for _, case in measured]

    # A case that predicts few tokens stores the losses of the base at them.
    with_base = CASES | {"base": Case("streaming:sinks=2,window=14")}
    assert cases_again(with_base, "a") == [*with_base.values()]
    with_few = CASES | {"few": Case("recompute:window=16", every=32)}
    assert cases_again(with_few, "a") == [with_few["few"], with_few["base"]]
    monkeypatch.setattr(parts, "TRIALS", parts.TRIALS / "again")
    assert cases_again(CASES, "another text") == [*CASES.values()]


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
