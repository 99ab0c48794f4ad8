"""Every policy has an equal KV budget, and its attended tokens are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.comparison import side_by_side
from jaxkv.evals.comparison.side_by_side import BUDGET, LONG, SHORT
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.models.tools.measurement import Stretches
from jaxkv.models.tools.passage import passage
from jaxkv.policies import POLICIES, Full, Quest, TopK

ENDS = {"sinks": 4, "window": 8}


@pytest.fixture(scope="module")
def llm():
    return models.load()


@pytest.mark.parametrize("rounds", [SHORT, LONG])
def test_every_policy_has_a_setting(llm, rounds):
    settings = side_by_side.settings(rounds)
    assert list(settings) == list(POLICIES)
    for name, setting in settings.items():
        assert setting.split(":")[0] == name
        llm.policies(setting)


def attended(llm, name, prompt, new_tokens=0):
    """Attended tokens with the setting of the short prompt, after `prompt` tokens and `more`."""
    ids = passage(llm, prompt + new_tokens)
    stream = models.Stream(llm, side_by_side.settings(SHORT)[name], tokens=len(ids))
    stream.prefill([ids[:prompt]])
    stream.finish_prefill()
    if new_tokens:
        stream.prefill([ids[prompt:]])
    return side_by_side.attended(stream)


def test_every_policy_attends_to_its_budget_after_the_prompt(llm):
    prompt = side_by_side.prompt_of(SHORT)
    for name in ("window", "uniform"):
        assert attended(llm, name, prompt) == {"mean": BUDGET, "min": BUDGET, "max": BUDGET}
    assert attended(llm, "full", prompt)["mean"] == prompt
    for name in ("topk", "loki"):
        assert attended(llm, name, prompt)["mean"] == pytest.approx(BUDGET, abs=1)


def test_costs_are_measured_without_empty_slots(llm):
    """Full attention reads empty slots too, so they would favour all other policies."""
    ids = passage(llm, side_by_side.prompt_of(SHORT))
    settings = side_by_side.settings(SHORT, side_by_side.WRITTEN)
    chosen = {name: settings[name] for name in ("full", "uniform", "streaming")}
    chosen["streaming again"] = settings["streaming"]
    costs = side_by_side.costs(llm, ids, chosen, count=1)
    full, uniform, streaming, again = (costs[name] for name in chosen)
    assert uniform["reading_bytes"] > 1.2 * uniform["state_bytes"]
    a_token = llm.config.layers * (2 * llm.spec.kv_heads * llm.spec.head_dim * 4 + 4)
    assert full["reading_bytes"] == full["state_bytes"] < 1.11 * len(ids) * a_token
    assert full["state_bytes"] > 2 * streaming["state_bytes"]
    assert full["times_as_long"]["median"] == 1 and uniform["times_as_long"]["n"] == 1
    # Each compiles by itself, although programs are shared.
    assert again["compile_seconds"] > streaming["compile_seconds"] / 4 > 0


@pytest.fixture(scope="module")
def small(llm):
    """One layer of the model: quick to compile."""
    return replace(llm, config=replace(llm.config, layers=1, windows=(None,), context=96))


@pytest.fixture(scope="module")
def text():
    """Three random stretches."""
    return Stretches(np.random.default_rng(0).integers(3, 4096, (3, 96)).astype(np.int32), 72)


def test_reading_all_keys_is_full_attention(small, text):
    uniform = matched_budgets.methods(1.0, (4, 20), **ENDS)["uniform"]
    policies = {"full": Full(max=96), "topk": TopK(1.0, **ENDS), "uniform": uniform,
                "quest": Quest(1.0, page=4, **ENDS), "few": TopK(0.1, **ENDS)}  # fmt: skip
    losses = side_by_side.after_prompts(small, text, policies, 1)
    for tokens, mean in zip(text.tokens, losses["full"][0], strict=True):
        every = np.concatenate(list(models.losses(small, tokens, Full(max=96))))
        assert mean == pytest.approx(every[text.prompt :].mean(), rel=1e-5)
    assert np.all(losses.pop("few") != losses["full"])
    for name, by_seed in losses.items():
        np.testing.assert_allclose(by_seed, losses["full"], rtol=1e-5, err_msg=name)


def test_blocks_are_means_of_one_stream(small, text, monkeypatch):
    monkeypatch.setattr(side_by_side, "BLOCK", 20)
    tokens = text.tokens.ravel().tolist()
    means = side_by_side.blocks(small, tokens, "streaming:sinks=4,window=60", 1)
    stream = models.Stream(small, "streaming:sinks=4,window=60", tokens=len(tokens))
    every = np.concatenate(list(models.losses(small, tokens, stream=stream)))
    np.testing.assert_allclose(means, [every[:280].reshape(14, 20).mean(1)], rtol=1e-5)
