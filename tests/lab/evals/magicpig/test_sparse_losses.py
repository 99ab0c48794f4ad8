"""Sparse attention at equal shares: shares that are read, and losses after a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.magicpig import (
    matched_budgets,
    sparse_losses,
)
from jaxkv.evals.magicpig.heads import capture
from jaxkv.policies import Full, MagicPIG, TopP

CONTEXT, PROMPT, SINKS, WINDOW = 96, 72, 4, 8
ENDS = {"sinks": SINKS, "window": WINDOW}
FULL = Full(max=CONTEXT)


def share_read(llm, policy, stretches, prompt, seeds=1):
    """The mean share of the keys between that the tokens after a prompt attend to."""
    shares = []
    for ids in stretches:
        for seed in range(seeds):
            roomy = sparse_losses.with_room(policy, prompt, len(ids))
            stream = models.Stream(llm, roomy, seed=seed, tokens=len(ids))
            stream.prefill([ids[:prompt]])
            stream.finish_prefill()
            for number in range(prompt, len(ids)):
                shares.append(sparse_losses.share_read(llm, stream, ids[: number + 1]))
                stream.prefill([[ids[number]]])
    return np.mean(shares)


@pytest.fixture(scope="module")
def llm():
    """One layer of the default model: quick to compile."""
    model = models.load()
    return replace(model, config=replace(model.config, layers=1, windows=(None,), context=CONTEXT))


@pytest.fixture(scope="module")
def stretches(llm):
    return np.random.default_rng(0).integers(3, llm.config.vocab, (6, CONTEXT)).tolist()


def test_chosen_tables_select_the_requested_share(llm, stretches):
    between = [capture(llm, tokens) for tokens in stretches[3:]]
    angles = matched_budgets.angles(llm.spec, between, PROMPT, SINKS, WINDOW)
    assert angles.share.sum() == pytest.approx(1)
    for share in (0.05, 0.2):
        bits, tables = matched_budgets.tables(angles, share)
        near = [abs(angles.attended(bits, tables + extra) - share) for extra in (-1, 0, 1)]
        assert min(near) == near[1]
        begins = [tokens[: PROMPT + 8] for tokens in stretches[:3]]
        read = share_read(llm, MagicPIG(bits, tables, **ENDS), begins, PROMPT, seeds=2)
        assert read == pytest.approx(share, rel=0.15)


def test_a_shared_prompt_gives_the_losses_of_a_prompt_that_is_read(llm, stretches):
    """Of methods that draw from an index, draw without one, and do not draw."""
    methods = matched_budgets.methods(0.2, (4, 12), SINKS, WINDOW, 0.5)
    policies = {"full": FULL} | {name: methods[name] for name in ("magicpig", "oracle", "topk")}
    columns = sparse_losses.read(llm, stretches[1], PROMPT, policies, 3)
    for (name, policy), row in zip(policies.items(), columns, strict=True):
        loss, kl, agreement, share, _ = row
        stream = models.Stream(llm, policy, seed=3, tokens=CONTEXT)
        losses = models.losses(llm, stretches[1], chunk=PROMPT, stream=stream, prompt=PROMPT)
        assert loss == pytest.approx(np.concatenate(list(losses)).mean(), rel=1e-4), name
        if name != "full":
            assert kl > 0 and 0 < agreement <= 1 and 0 < share < 0.6, name
    assert columns[0, 1:4].tolist() == [pytest.approx(0, abs=1e-6), 1, 1]


def test_the_mass_of_top_p_reads_the_requested_share(llm, stretches):
    seen = [capture(llm, tokens) for tokens in stretches[:3]]
    masses = matched_budgets.masses(llm.spec, seen, PROMPT, SINKS, WINDOW)
    for share in (0.1, 0.3):
        chosen = TopP(masses.reaching(share), **ENDS)
        assert share_read(llm, chosen, stretches[:3], PROMPT) == pytest.approx(share, rel=0.02)
