"""Methods at equal shares: each reads its share, and a share of one is full attention."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import parts
from jaxkv.evals.lib.record import Record
from jaxkv.evals.magicpig import (
    claims,
    matched_budgets,
    report,
    sparse,
    sparse_losses,
    sparse_recall,
    sparse_tokens,
)
from jaxkv.evals.magicpig.inclusion import isotropic
from jaxkv.evals.magicpig.matched_budgets import EndsOnly
from jaxkv.evals.magicpig.sparse import ScoredText
from jaxkv.policies import Full, MagicPIG, Oracle, Quest, TopK, TopP

CONTEXT, SINKS, WINDOW = 96, 4, 8
ENDS = {"sinks": SINKS, "window": WINDOW}
FULL = Full(max=CONTEXT)


def drawn(share):
    """A uniform sample of that share."""
    return matched_budgets.methods(share, (4, 20), **ENDS)["uniform"]


@pytest.fixture(scope="module")
def llm():
    """One layer of the default model: quick to compile."""
    whole = models.load()
    return replace(whole, config=replace(whole.config, layers=1, windows=(None,), context=CONTEXT))


@pytest.fixture(scope="module")
def text(llm):
    draws = np.random.default_rng(0).integers(3, llm.config.vocab, (6, CONTEXT))
    each = draws.tolist()
    return ScoredText(llm, [], each[:3], each[3:])


@pytest.fixture(scope="module")
def seen(text):
    return matched_budgets.captured(text.llm, text.stretches)


@pytest.mark.parametrize(
    "words, reported",
    [
        (["--shares", "0"], "--shares must be above 0"),
        (["--stretches", "1"], "--stretches must be at least 2"),
        (["--written", "400"], "leave no room"),
        (["--only", "speed"], "invalid choice"),
        ([], "holds only"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(words, reported, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["sparse", "--texts", str(tmp_path), *words])
    with pytest.raises(SystemExit) as end:
        sparse.main()
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error" in last and reported in last


def test_scored_stretches_and_those_for_tuning_do_not_overlap(llm, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(4_000))))
    found = ScoredText.of(llm, tmp_path, Namespace(stretches=3, apart=1_000))
    every = found.stretches + found.between
    assert [len(tokens) for tokens in every] == [CONTEXT] * 6
    assert all(tokens[0] == llm.tokenizer.front[0] for tokens in every)
    whole = llm.tokenizer.encode((tmp_path / "text.txt").read_text())
    rest = CONTEXT - 1
    begins = [
        next(i for i in range(len(whole)) if whole[i : i + rest] == tokens[1:]) for tokens in every
    ]
    assert min(np.diff(sorted(begins))) >= rest


@pytest.mark.slow
def test_chosen_tables_select_the_requested_share(text, seen):
    between = matched_budgets.captured(text.llm, text.between)
    angles = matched_budgets.angles(text.llm.spec, between, text.prompt, SINKS, WINDOW)
    assert angles.share.sum() == pytest.approx(1)
    for wanted in (0.05, 0.2):
        bits, tables = matched_budgets.tables(angles, wanted)
        near = [abs(angles.attended(bits, tables + more) - wanted) for more in (-1, 0, 1)]
        assert min(near) == near[1]
        found = matched_budgets.read(text.llm, MagicPIG(bits, tables, **ENDS), seen, text.prompt, 8)
        assert found["mean"] == pytest.approx(wanted, rel=0.15)


@pytest.mark.slow
def test_each_method_reads_its_share(text, seen):
    between = np.arange(CONTEXT - 8, CONTEXT) + 1 - SINKS - WINDOW
    wanted = np.mean(np.ceil(0.1 * between) / between)
    for chosen in (TopK(0.1, **ENDS), drawn(0.1)):
        found = matched_budgets.read(text.llm, chosen, seen, text.prompt, 8)
        assert found["mean"] == pytest.approx(wanted, rel=1e-5)
    # Repeated draws of one key read it once.
    assert (
        0
        < matched_budgets.read(text.llm, Oracle(0.1, **ENDS), seen, text.prompt, 8)["mean"]
        < wanted
    )
    assert matched_budgets.read(text.llm, EndsOnly(**ENDS), seen, text.prompt, 8)["mean"] == 0


@pytest.mark.slow
def test_full_attention_does_not_depend_on_the_protocol(text):
    whole = sparse.losses(text, FULL, 1, "full")[0]
    apart = [sparse.after_prompt(text, FULL, stretch, 0, question=8) for stretch in range(3)]
    np.testing.assert_allclose(apart, whole, rtol=1e-5)
    for tokens, mean in zip(text.stretches, whole, strict=True):
        wanted = np.concatenate(list(models.losses(text.llm, tokens, FULL)))[text.prompt :]
        assert mean == pytest.approx(wanted.mean(), rel=1e-5)


@pytest.mark.slow
def test_reading_all_keys_is_full_attention(text):
    whole = sparse.losses(text, FULL, 1, "full")
    some = sparse.losses(text, TopK(0.1, **ENDS), 1, "topk")
    assert np.all(some != whole)
    for chosen in (TopK(1.0, **ENDS), drawn(1.0), Quest(1.0, page=4, **ENDS)):
        found = sparse.losses(text, chosen, 1, "all")
        np.testing.assert_allclose(found, whole, rtol=1e-5, err_msg=str(chosen))


@pytest.mark.slow
def test_random_methods_depend_on_the_seed(text):
    found = matched_budgets.methods(0.2, (4, 12), SINKS, WINDOW)
    for name, chosen in found.items():
        same = len({sparse.after_prompt(text, chosen, 0, seed) for seed in (0, 1)}) == 1
        assert same != (name in matched_budgets.DRAWING), name


def test_errors_over_stretches_and_over_seeds():
    base = np.array([[1.0, 2.0, 3.0]])
    found = sparse.excess_loss(base + np.array([[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]), base)
    assert found["mean"] == pytest.approx(0.3)
    assert found["each"] == pytest.approx([0.2, 0.3, 0.4])
    assert found["two_errors"]["stretches"] == pytest.approx(2 * 0.1 / 3**0.5)
    assert found["two_errors"]["seeds"] == pytest.approx(0.2)


@pytest.mark.slow
def test_bytes_of_magicpig_include_keys_and_tables(text):
    spec = text.llm.spec
    policies = {"magicpig": MagicPIG(4, 20, **ENDS, start=72, tail=1)} | sparse.compressed(72)
    found = sparse.of_prompt(policies, spec, 2, 72)
    assert found["full"]["tokens_of_full"] == 72
    assert found["magicpig"]["over_full"] > 1 > found["snapkv, 1/2"]["over_full"]
    stream = models.Stream(text.llm, policies["magicpig"], tokens=72)
    stream.prefill([text.stretches[0][:72]], 72)
    stream.finish_prefill()
    assert 2 * stream.state_bytes == found["magicpig"]["state_bytes"]


def test_a_model_that_has_not_learnt_the_task_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sparse_recall.facts, "write", lambda _: None)
    monkeypatch.setattr(sparse_recall, "pretrain", lambda *_, **__: None)
    monkeypatch.setattr(models, "load", lambda _: None)
    right = {"full": {"right": {"16": 0.95, "32": 0.89}}}
    monkeypatch.setattr(sparse_recall.questions, "accuracy", lambda *_: right)
    with pytest.raises(SystemExit, match="answers 89%"):
        sparse_recall.trained(tmp_path, [0])


@pytest.mark.slow
def test_a_filled_cache_can_be_decoded_from(llm, monkeypatch):
    monkeypatch.setattr(sparse_tokens, "random_llama", lambda _: (llm, None))
    given = Namespace(written=4, rounds=2)
    found = sparse_tokens.measure({"layers": 1}, 600, given)
    assert found["layers"] == 1 and found["times_faster"]["n"] == 2
    assert found["state_bytes"]["magicpig"] > found["state_bytes"]["full"]
    # Queries span more dimensions than keys.
    assert isotropic(10, 150, 64) < found["share_attended"]["mean"] < isotropic(10, 150, 8)


@pytest.mark.parametrize(
    "texts, reported",
    [
        (["README.md"], "at least 2 files, got 1"),
        (["README.md", "LICENSE"], "README, LICENSE has fewer"),
    ],
)
def test_losses_need_texts_of_some_length(texts, reported, monkeypatch, capsys):
    words = ["--model", str(models.llm.DEFAULT), "--texts", *texts, "--prompt", "100000"]
    monkeypatch.setattr(sys, "argv", ["sparse_losses", *words])
    with pytest.raises(SystemExit) as end:
        sparse_losses.main()
    assert end.value.code == 2 and reported in capsys.readouterr().err


@pytest.fixture(scope="module")
def read(text):
    """The stretches as texts with a prompt."""
    return [sparse_losses.RecordedText(text.llm, tokens, text.prompt) for tokens in text.stretches]


@pytest.mark.slow
def test_a_recorded_prompt_gives_the_losses_of_a_prompt_that_is_read(text, read):
    for chosen in matched_budgets.methods(0.2, (4, 12), SINKS, WINDOW, 0.5).values():
        (loss, kl, agreement, share, _), seed = read[1].measured(chosen, 3), 3
        assert loss == pytest.approx(sparse.after_prompt(text, chosen, 1, seed), rel=1e-4), chosen
        assert kl > 0 and 0 < agreement <= 1 and 0 < share < 0.6, chosen
    loss, kl, agreement, share, _ = read[1].measured(FULL, 0)
    assert (kl, agreement, share) == (pytest.approx(0, abs=1e-6), 1, 1)


@pytest.mark.slow
def test_the_mass_of_top_p_reads_the_requested_share(text, seen):
    last = CONTEXT - matched_budgets.ASKED  # the queries on which shares are measured
    found = matched_budgets.masses(text.llm.spec, seen, last, SINKS, WINDOW)
    for share in (0.1, 0.3):
        chosen = TopP(found.reaching(share), **ENDS)
        read = matched_budgets.read(text.llm, chosen, seen, text.prompt)["mean"]
        assert read == pytest.approx(share, rel=0.02)


@pytest.mark.slow
def test_an_interrupted_run_of_losses_continues(llm, text, read, monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "TRIALS", tmp_path)
    between = [sparse_losses.RecordedText(llm, tokens, text.prompt) for tokens in text.between]
    record = Record("sparse_135m", quick=True)
    run = lambda: sparse_losses.MethodLosses(llm, read, between, 2, record).all([0.3])  # noqa: E731
    found = run()
    monkeypatch.setattr(sparse_losses.RecordedText, "after_prompt", None)
    assert run() == found
    lines = found["shares"]["0.3"]
    assert list(lines) == list(matched_budgets.methods(0.3, (4, 4), SINKS, WINDOW, 0.5))
    for name, line in lines.items():
        assert line["share_read"]["mean"] == pytest.approx(0.3, abs=0.15), name
        assert line["seconds"]["n"] == (6 if name in matched_budgets.DRAWING else 3)
        assert line["over_full"]["mean"] < found["ends alone"]["over_full"]["mean"] + 0.1, name
    verdicts = {"perplexity": {"ours": found}}
    assert "topp" in claims.less_than_others(verdicts)[0]
    assert claims.little_is_lost(verdicts)[0]
    table = report.rows(verdicts["perplexity"]).splitlines()
    assert len(table) == 6 + len(lines) and {row.count("|") for row in table[2:]} == {9}
