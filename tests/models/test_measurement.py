"""Losses after prompts: every policy, shared prompts, stretches, paired errors, recomputation."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.network import uncached
from jaxkv.models.tools import measurement, recompute
from jaxkv.models.tools.measurement import Stretches, paired
from jaxkv.policies import POLICIES
from tests.tiny import write_tiny

PROMPT, SCORED = 40, 6
ENDS = "sinks=2,window=5"
# A setting of every policy with which the prompt overfills its cache.
SETTINGS = {
    "full": "full",
    "window": "window:window=9",
    "streaming": f"streaming:{ENDS}",
    "h2o": "h2o:heavy=4,window=5",
    "reservoir": f"reservoir:{ENDS},sample=4",
    "stratified": f"stratified:{ENDS},sample=4",
    "balance-stream": f"balance-stream:{ENDS},levels=2,block=4",
    "balance": f"balance:{ENDS},rounds=2,block=8",
    "uniform": f"uniform:{ENDS},rounds=2",
    "snapkv": "snapkv:capacity=12,window=5",
    "pyramidkv": "pyramidkv:capacity=12,window=5",
    "expected-attention": "expected-attention:capacity=12,sinks=2",
    "keydiff": "keydiff:capacity=12",
    "retrieval": "retrieval:capacity=12,sinks=2,window=5",
    "tova": "tova:capacity=12",
    "rkv": "rkv:capacity=12,window=5,every=4",
    "vase": "vase:capacity=16,window=5,every=4",
    "triattention": "triattention:capacity=12,every=4",
    "magicpig": f"magicpig:K=3,L=8,{ENDS}",
    "topk": f"topk:share=0.2,{ENDS}",
    "topp": f"topp:mass=0.5,{ENDS}",
    "oracle": f"oracle:share=0.2,{ENDS}",
    "quest": f"quest:share=0.2,page=4,fewest=1,{ENDS}",
    "loki": f"loki:share=0.2,{ENDS}",
    "vattention": f"vattention:{ENDS}",
}
OTHERS = ["snapkv:capacity=12,window=5,storage=int8", f"0=full;*=uniform:{ENDS},rounds=2"]


@pytest.fixture(scope="module")
def text():
    ids = np.random.default_rng(0).integers(2, 250, (2, PROMPT + SCORED + 1))
    return Stretches(ids.astype(np.int32), PROMPT)


@contextlib.contextmanager
def watch(label, total, unit):
    yield lambda done: None


def plain(llm, policy, ids, seed):
    """The losses after the prompt, which this policy reads by itself."""
    stream = models.Stream(llm, policy, seed=seed, tokens=len(ids))
    return np.concatenate(list(models.losses(llm, ids, stream=stream, prompt=PROMPT)))


def test_every_policy_is_measured(llm, text):
    """All together, so that policies which attend exactly share the reading of the prompt."""
    assert set(SETTINGS) == set(POLICIES)
    names = [*SETTINGS.values(), *OTHERS]
    (group, *_) = measurement.grouped(llm, text, names, "full")
    assert group.names[0] == "full" and len(group.names) == 16
    scores = measurement.measure(llm, text, names, 5, watch, full="full")
    assert [score.policy for score in scores] == names
    for score in scores:
        assert text.is_complete(score)
        for number, ids in enumerate(text.tokens):
            expected = plain(llm, score.policy, ids, 5 + number)
            np.testing.assert_allclose(
                score.by_stretch[number], expected, atol=2e-4, err_msg=score.policy
            )
    away = {score.policy: score.kl.mean() for score in scores}
    assert away["full"] == 0 and min(away[name] for name in names[1:]) > 1e-6


def test_full_attention_is_that_of_a_plain_forward(llm, text):
    (score,) = measurement.measure(llm, text, ["full"], 0, watch)
    decoder, hidden, _ = uncached.forward(llm.config, llm.weights, text.tokens)
    logits = np.asarray(decoder.logits(hidden), np.float64)[:, PROMPT:-1]
    targets = text.tokens[:, PROMPT + 1 :]
    picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(logits).sum(axis=-1)) - picked
    np.testing.assert_allclose(score.by_stretch, expected, atol=1e-4)
    assert np.isnan(score.kl).all()


def test_a_prompt_longer_than_a_chunk_is_shared_too(llm, text, monkeypatch):
    monkeypatch.setattr("jaxkv.models.generation.shared_prompt.CHUNK", 16)
    names = ["full", SETTINGS["snapkv"], SETTINGS["expected-attention"]]
    scores = measurement.measure(llm, text, names, 0, watch)
    for score in scores:
        np.testing.assert_allclose(
            score.by_stretch[0], plain(llm, score.policy, text.tokens[0], 0), atol=2e-4
        )


def test_without_a_prompt_all_tokens_are_scored(llm, text):
    stretches = Stretches(text.tokens, 0)
    (score,) = measurement.measure(llm, stretches, ["window:window=9"], 0, watch, chunk=16)
    for ids, losses in zip(text.tokens, score.by_stretch, strict=True):
        expected = np.concatenate(list(models.losses(llm, ids, "window:window=9", 16)))
        np.testing.assert_allclose(losses, expected, atol=1e-6)


@pytest.mark.parametrize("policy", ["uniform", "topk", f"0=full;*=uniform:{ENDS}", "snapkv"])
def test_a_policy_that_acts_on_a_prompt_needs_one(llm, text, policy):
    with pytest.raises(UserError, match=r"acts at the end of a prompt of at least .* got 0; give"):
        measurement.grouped(llm, Stretches(text.tokens, 0), [policy])


@pytest.mark.parametrize("front", [[1], [1, 300]])
def test_stretches_follow_each_other(llm, front):
    body = np.arange(100, 200)
    fronted = replace(llm, tokenizer=replace(llm.tokenizer, front=tuple(front)))
    text = measurement.cut(fronted, [*front, *body], 20, 9, None, 8)
    step = 30 - len(front)
    assert text.tokens.shape == (100 // step, 30) and (text.prompt, text.scored) == (20, 9)
    assert (text.tokens[:, : len(front)] == front).all()
    joined = text.tokens[:, len(front) :].reshape(-1)
    assert joined.tolist() == body[: len(joined)].tolist()
    assert len(measurement.cut(fronted, [*front, *body], 20, 9, 2, 8).tokens) == 2
    with pytest.raises(UserError, match=r"at least 30 tokens, got 29; give a longer text"):
        measurement.cut(fronted, [*front, *body][:29], 20, 9, None, 8)


def test_errors_are_those_of_block_means(rng):
    values = rng.normal(size=(4, 30)) + np.repeat(rng.normal(size=(4, 3)), 10, axis=1)
    means = values.reshape(12, 10).mean(axis=1)
    estimate = paired(values, 10)
    assert estimate["mean"] == pytest.approx(values.mean()) and estimate["count"] == 120
    assert estimate["two_errors"] == pytest.approx(2 * means.std(ddof=1) / 12**0.5)
    of_stretches = paired(values, 30)["two_errors"]
    assert of_stretches == pytest.approx(2 * values.mean(axis=1).std(ddof=1) / 4**0.5)
    chosen = np.broadcast_to(np.arange(30) % 10 < 3, (4, 30))
    of_some = paired(values, 10, chosen)
    means = values.reshape(12, 10)[:, :3].mean(axis=1)
    assert of_some["two_errors"] == pytest.approx(2 * means.std(ddof=1) / 12**0.5)
    assert paired(values, 10, np.arange(120).reshape(4, 30) < 5)["two_errors"] is None
    assert paired(values, 10, np.zeros((4, 30), bool))["mean"] is None


def test_the_interval_covers_the_mean(rng):
    """Of 400 means of correlated values, about 95 % are within two errors of the true one."""
    inside = 0
    for _ in range(400):
        values = rng.normal(size=(5, 60)) + np.repeat(rng.normal(size=(5, 6)), 10, axis=1)
        counted = rng.random((5, 60)) < np.repeat(rng.random((5, 6)), 10, axis=1)
        estimate = paired(values, 10, counted)
        inside += abs(estimate["mean"]) <= estimate["two_errors"]
    assert 0.90 < inside / 400 < 0.98


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


def test_recompute_keeps_the_window_of_the_model(tmp_path):
    folder = write_tiny(
        tmp_path / "m", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=5
    )
    llm = models.load(folder)
    ids = np.random.default_rng(0).integers(2, 258, 40)
    losses = np.concatenate(list(recompute.losses(llm, ids, 39)))
    np.testing.assert_allclose(losses, full(llm, ids), atol=1e-5)
