"""Sparse attention at equal shares: shares that are read, and losses after a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.comparison.side_by_side import PromptedText, after_prompt
from jaxkv.evals.lib import parts
from jaxkv.evals.lib.record import Record
from jaxkv.evals.magicpig import (
    matched_budgets,
    report,
    sparse_losses,
)
from jaxkv.evals.magicpig.heads import capture
from jaxkv.evals.magicpig.matched_budgets import EndsOnly
from jaxkv.policies import Full, MagicPIG, Oracle, TopK, TopP
from tests.lab.evals.magicpig.shares import share_read

CONTEXT, PROMPT, SINKS, WINDOW = 96, 72, 4, 8
ENDS = {"sinks": SINKS, "window": WINDOW}
FULL = Full(max=CONTEXT)


def drawn(share):
    """A uniform sample of that share."""
    return matched_budgets.methods(share, (4, 20), **ENDS)["uniform"]


@pytest.fixture(scope="module")
def llm():
    """One layer of the default model: quick to compile."""
    model = models.load()
    return replace(model, config=replace(model.config, layers=1, windows=(None,), context=CONTEXT))


@pytest.fixture(scope="module")
def stretches(llm):
    return np.random.default_rng(0).integers(3, llm.config.vocab, (6, CONTEXT)).tolist()


@pytest.fixture(scope="module")
def text(llm, stretches):
    return PromptedText(llm, stretches[:3], PROMPT)


@pytest.fixture(scope="module")
def between(stretches):
    """Stretches on which K, L and the mass are chosen."""
    return stretches[3:]


@pytest.fixture(scope="module")
def seen(text):
    return [capture(text.llm, tokens) for tokens in text.tokens]


@pytest.mark.slow
def test_chosen_tables_select_the_requested_share(text, between, seen):
    between = [capture(text.llm, tokens) for tokens in between]
    angles = matched_budgets.angles(text.llm.spec, between, text.prompt, SINKS, WINDOW)
    assert angles.share.sum() == pytest.approx(1)
    for share in (0.05, 0.2):
        bits, tables = matched_budgets.tables(angles, share)
        near = [abs(angles.attended(bits, tables + extra) - share) for extra in (-1, 0, 1)]
        assert min(near) == near[1]
        read = share_read(text.llm, MagicPIG(bits, tables, **ENDS), seen, text.prompt, 8)
        assert read["mean"] == pytest.approx(share, rel=0.15)


@pytest.mark.slow
def test_each_method_reads_its_share(text, seen):
    between = np.arange(CONTEXT - 8, CONTEXT) + 1 - SINKS - WINDOW
    expected = np.mean(np.ceil(0.1 * between) / between)
    for chosen in (TopK(0.1, **ENDS), drawn(0.1)):
        read = share_read(text.llm, chosen, seen, text.prompt, 8)
        assert read["mean"] == pytest.approx(expected, rel=1e-5)
    # Repeated draws of one key read it once.
    assert 0 < share_read(text.llm, Oracle(0.1, **ENDS), seen, text.prompt, 8)["mean"] < expected
    assert share_read(text.llm, EndsOnly(**ENDS), seen, text.prompt, 8)["mean"] == 0


@pytest.fixture(scope="module")
def read(text):
    """The stretches as texts with a prompt."""
    return [sparse_losses.RecordedText(text.llm, tokens, text.prompt) for tokens in text.tokens]


@pytest.mark.slow
def test_a_recorded_prompt_gives_the_losses_of_a_prompt_that_is_read(text, read):
    for chosen in matched_budgets.methods(0.2, (4, 12), SINKS, WINDOW, 0.5).values():
        (loss, kl, agreement, share, _), seed = read[1].measured(chosen, 3), 3
        assert loss == pytest.approx(after_prompt(text, chosen, 1, seed), rel=1e-4), chosen
        assert kl > 0 and 0 < agreement <= 1 and 0 < share < 0.6, chosen
    loss, kl, agreement, share, _ = read[1].measured(FULL, 0)
    assert (kl, agreement, share) == (pytest.approx(0, abs=1e-6), 1, 1)


@pytest.mark.slow
def test_the_mass_of_top_p_reads_the_requested_share(text, seen):
    last = CONTEXT - matched_budgets.ASKED  # the queries on which shares are measured
    masses = matched_budgets.masses(text.llm.spec, seen, last, SINKS, WINDOW)
    for share in (0.1, 0.3):
        chosen = TopP(masses.reaching(share), **ENDS)
        read = share_read(text.llm, chosen, seen, text.prompt)["mean"]
        assert read == pytest.approx(share, rel=0.02)


@pytest.mark.slow
def test_an_interrupted_run_of_losses_continues(llm, between, read, monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "TRIALS", tmp_path)
    between = [sparse_losses.RecordedText(llm, tokens, PROMPT) for tokens in between]
    record = Record("sparse_135m", quick=True)
    run = lambda: sparse_losses.MethodLosses(llm, read, between, 2, record).all([0.3])  # noqa: E731
    results = run()
    monkeypatch.setattr(sparse_losses.RecordedText, "after_prompt", None)
    assert run() == results
    lines = results["shares"]["0.3"]
    assert list(lines) == list(matched_budgets.methods(0.3, (4, 4), SINKS, WINDOW, 0.5))
    for name, line in lines.items():
        assert line["share_read"]["mean"] == pytest.approx(0.3, abs=0.15), name
        assert line["seconds"]["n"] == (6 if name in matched_budgets.DRAWING else 3)
        assert line["over_full"]["mean"] < results["ends alone"]["over_full"]["mean"] + 0.1, name
    table = report.losses_of({"ours": results}).splitlines()
    assert len(table) == 4 + len(lines) and {row.count("|") for row in table[2:]} == {4}
