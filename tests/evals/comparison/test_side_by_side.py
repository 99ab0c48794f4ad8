"""Every policy has an equal KV budget, and its attended tokens are counted."""

from __future__ import annotations

import pytest

from jaxkv import models
from jaxkv.evals.comparison import side_by_side
from jaxkv.evals.comparison.side_by_side import BUDGET, LONG, SHORT
from jaxkv.evals.lib.text import passage
from jaxkv.policies import POLICIES


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


def attended(llm, name, prompt, more=0):
    """Attended tokens with the setting of the short prompt, after `prompt` tokens and `more`."""
    ids = passage(llm, prompt + more)
    stream = models.Stream(llm, side_by_side.settings(SHORT)[name], tokens=len(ids))
    stream.prefill([ids[:prompt]])
    stream.finish_prefill()
    if more:
        stream.prefill([ids[prompt:]])
    return side_by_side.attended(stream)


@pytest.mark.slow
def test_every_policy_attends_to_its_budget_after_the_prompt(llm):
    prompt = side_by_side.prompt_of(SHORT)
    for name in ("window", "uniform"):
        assert attended(llm, name, prompt) == {"mean": BUDGET, "min": BUDGET, "max": BUDGET}
    assert attended(llm, "full", prompt)["mean"] == prompt
    assert attended(llm, "topk", prompt)["mean"] == pytest.approx(BUDGET, abs=1)


@pytest.mark.slow
def test_a_compressed_prompt_caches_all_later_tokens(llm):
    prompt = side_by_side.prompt_of(SHORT)
    assert attended(llm, "uniform", prompt, 8)["mean"] == BUDGET + 8
    assert attended(llm, "topk", prompt, 8)["mean"] == pytest.approx(BUDGET + 2, abs=1)


def test_a_different_full_attention_loss_is_refused():
    ((stretches, loss), *_) = side_by_side.FULL_LOSS.items()
    side_by_side.check(loss + 0.9 * side_by_side.TOLERANCE, stretches)
    for off in (-2, 2, float("nan")):
        with pytest.raises(SystemExit, match=f"within .* of {loss}.*FULL_LOSS"):
            side_by_side.check(loss + off * side_by_side.TOLERANCE, stretches)


@pytest.mark.slow
def test_costs_are_measured_without_empty_slots(llm):
    """Full attention reads empty slots too, so they would favour all other policies."""
    ids = passage(llm, side_by_side.prompt_of(SHORT))
    settings = side_by_side.settings(SHORT, side_by_side.WRITTEN)
    chosen = {name: settings[name] for name in ("full", "uniform", "streaming")}
    found = side_by_side.costs(llm, ids, chosen, count=1)
    full, uniform, streaming = (found[name] for name in chosen)
    assert uniform["reading_bytes"] > 1.2 * uniform["state_bytes"]
    a_token = llm.config.layers * (2 * llm.spec.kv_heads * llm.spec.head_dim * 4 + 4)
    assert full["reading_bytes"] == full["state_bytes"] < 1.11 * len(ids) * a_token
    assert full["state_bytes"] > 2 * streaming["state_bytes"]
    assert full["times_as_long"]["median"] == 1 and uniform["times_as_long"]["n"] == 1
