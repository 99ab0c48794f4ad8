"""Prompt compression: published budgets and weights, and scores compared with numpy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import draws
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.policies import Balance, ExpectedAttention, PyramidKV, SnapKV, VaSE
from jaxkv.policies.prompt_compression.balance import _as_published
from jaxkv.policies.prompt_compression.base import ScoredTokens
from jaxkv.policy_spec import by_layer, format_policy, parse_policy
from jaxkv.rotary import NoPosition, rotary
from tests.core import oracle
from tests.core.tokens import cached, chunk, cut, state_after

SPEC = Spec(1, 8, 1.0, NoPosition(), group=1)
TOKENS, KV_HEADS, GROUP, HEAD_DIM, SCALE = 40, 2, 3, 8, 0.4
HEADS = KV_HEADS * GROUP


def test_pyramidkv_budgets_fall_from_layer_to_layer():
    """32 layers, with the published capacity 2048 and window 32: B = 2016, minimum 2016 // 20."""
    layers = by_layer("pyramidkv:capacity=2048", 32)
    budgets = [policy.scorer.capacity - 32 for policy in layers]
    assert budgets[0] == 2 * 2016 - 100 and budgets[1] == budgets[0] - (3932 - 100) // 31
    assert budgets == sorted(budgets, reverse=True) and 100 <= budgets[-1] < 120
    assert 2016 <= np.mean(budgets) < 2016 + 16
    # The step is rounded down, which small budgets feel most.
    small = [policy.scorer.capacity for policy in by_layer("pyramidkv:capacity=128", 30)]
    assert 128 < np.mean(small) <= 128 * 1.05
    assert len({type(policy) for policy in layers}) == 1 and layers[3].layer == 3


def test_one_pyramidkv_string_names_all_layers():
    layers = by_layer("pyramidkv:capacity=512", 4)
    assert format_policy(layers).startswith(
        "pyramidkv:capacity=512,window=32"
    ) and "layer" not in format_policy(layers)
    assert by_layer(format_policy(layers), 4) == layers


def test_the_half_that_the_published_code_keeps():
    """By hand: at the seventh token half of ten signs are +1. Each earlier -1 counts twice."""
    signs = jnp.asarray([[[1, 1, -1, 1, 1, -1, 1, -1, 1, -1, 0, 0]]], jnp.int32)
    chosen, times = _as_published(signs, jnp.asarray([10], jnp.int32))
    assert chosen[0, 0, :5].tolist() == [2, 5, 7, 8, 9]
    assert times[0, 0, :5].tolist() == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("text", ["uniform:sinks=1,window=2,start=16", "topk", "magicpig:K=4,L=6"])
def test_prefill_ends_once(text):
    policy, spec = parse_policy(text), SPEC
    state = policy.finish_prefill(spec, policy.init(spec, 1, jax.random.key(0)))
    with pytest.raises(UserError, match="prefill is finished already; call finish_prefill once"):
        policy.finish_prefill(spec, state)


@pytest.mark.parametrize("text, size", [("uniform", 10), ("snapkv:capacity=64", 200)])
def test_tokens_after_a_prompt_need_a_reserve(text, size):
    """Also after a prompt that is not compressed; it is then attended to exactly."""
    policy, spec = parse_policy(f"{text}{',' if ':' in text else ':'}start={size + 54}"), SPEC
    tokens = chunk(spec, size + 1)
    (q, k, v), token = tokens[:3], cut(tokens, size)
    state = policy.finish_prefill(spec, state_after(policy, spec, cut(tokens, 0, size)))
    with pytest.raises(UserError, match="reserve must be called after finish_prefill, got a state"):
        step(policy, spec, state, *token)
    out, _ = jax.jit(partial(step, policy, spec))(policy.reserve(spec, state, 1), *token)
    weights = np.exp(k[0, :, 0] @ q[0, -1, 0])
    exact = weights @ v[0, :, 0] / weights.sum()
    assert np.allclose(out[0, 0, 0], exact, atol=1e-5) == (size == 10)


def test_policies_that_store_queries_need_the_group():
    with pytest.raises(UserError, match=r"give Spec\(group=...\)"):
        SnapKV().init(Spec(2, 8, 1.0, NoPosition()), 1, jax.random.key(0))
    with pytest.raises(UserError, match=r"give Spec\(group=...\)"):
        ExpectedAttention().init(Spec(2, 8, 1.0, NoPosition()), 1, jax.random.key(0))
    assert Balance().min_prompt == 32 + 32 + 3 + 1 and PyramidKV().min_prompt == 1025


def test_every_makes_the_memory_constant():
    """The exact part has ends and `every` slots, the sample those of the budget, from `init` on."""
    policy = parse_policy("retrieval:capacity=20,sinks=2,window=3,every=8")
    assert not policy.grows and policy.min_prompt is None and policy.max_lookback == 28
    assert parse_policy("keydiff:capacity=20,every=8,positions=absolute").max_lookback == np.inf
    state = policy.init(SPEC, 1, jax.random.key(0))
    assert state.dense.k.shape[2] == 13 and state.sample.k.shape[2] == 15
    assert policy.reserve(SPEC, state, 10**6) is policy.finish_prefill(SPEC, state) is state
    assert policy.bytes_per_sequence(SPEC, 10**6) == policy.bytes_per_sequence(SPEC)


def test_a_layer_of_pyramidkv_looks_back_over_its_own_budget():
    """Lower layers have more tokens than `capacity`, and with `every` as many positions."""
    layers = by_layer("pyramidkv:capacity=64,window=8,every=8", 4)
    assert [policy.max_lookback for policy in layers] == [126, 90, 54, 18]
    for policy in layers:
        state = policy.init(SPEC, 1, jax.random.key(0))
        assert policy.cached(SPEC, state).positions.shape[2] == policy.max_lookback


def scored_tokens(policy, state):
    """The tokens of the prompts, as a score gets them."""
    prompt = state.dense
    positions = jnp.broadcast_to(prompt.positions[:, None], prompt.k.shape[:3])
    stored = PerHeadTokens(prompt.k, prompt.v, positions)
    count, statistics = prompt.count[:, None], state.statistics
    return ScoredTokens(stored, stored, count, statistics, state.rng, policy.ends)


@pytest.mark.parametrize("uniform", [0, 1 - 2**-24])
def test_the_extreme_draws_of_vase_are_finite(rng, monkeypatch, uniform):
    policy = VaSE(12, sinks=1, window=3, every=None, start=TOKENS, storage="int8")
    spec = Spec(KV_HEADS, HEAD_DIM, SCALE, NoPosition(), group=GROUP)
    state = state_after(policy, spec, chunk(spec, TOKENS, rng=rng, batch=2), 8)
    draw = lambda numbers, rng: jnp.full(numbers.shape, uniform, jnp.float32)
    monkeypatch.setattr(draws, "uniforms", draw)
    score = policy.score(spec, scored_tokens(policy, state))
    assert (jnp.sum(score == jnp.inf, axis=2) == policy.num_large).all()
    assert jnp.isfinite(jnp.where(score == jnp.inf, 0, score)).all()


def test_mean_and_covariance_are_those_of_the_queries_after_the_sinks(rng):
    """A mean that is thirty times the deviation loses no digits of the covariance."""
    spec, sinks = Spec(KV_HEADS, HEAD_DIM, SCALE, NoPosition(), group=GROUP), 3
    padding = np.array([0, 7])  # before the prompts
    tokens = chunk(spec, TOKENS, rng=rng, valid=np.arange(TOKENS) >= padding[:, None])
    tokens = tokens._replace(q=tokens.q + 30)
    q = np.asarray(tokens.q, np.float64)
    state = state_after(ExpectedAttention(9, sinks, start=64), spec, tokens, 8)
    for sequence, head in np.ndindex(2, HEADS):
        queries = q[sequence, padding[sequence] + sinks :, head]
        at = sequence, head // GROUP, slice(None), head % GROUP
        moments = state.statistics
        np.testing.assert_allclose(moments.mean[at][0], queries.mean(axis=0), rtol=1e-6)
        expected = np.cov(queries.T, bias=True)
        np.testing.assert_allclose(moments.covariance[at], expected, rtol=2e-5, atol=1e-5)


def test_the_score_is_the_expectation_over_normal_queries(rng):
    """By sampling: the mean of exp(logit) over two million queries, rotated to the one position
    that is asked for, over its sum; times the length of the value."""
    spec = Spec(1, HEAD_DIM, SCALE, rotary(HEAD_DIM, 100.0), group=1)
    policy = ExpectedAttention(9, 0, future=1, start=64)
    mix = 0.5 * rng.normal(size=(HEAD_DIM, HEAD_DIM)).astype(np.float32)
    tokens = chunk(spec, TOKENS, rng=rng)
    tokens = tokens._replace(q=tokens.q @ mix + np.float32(0.3))
    q, k, v = map(np.asarray, tokens[:3])
    state = state_after(policy, spec, tokens, 8)
    score = policy.score(spec, scored_tokens(policy, state))
    queries = q[0, :, 0].astype(np.float64)
    drawn = rng.multivariate_normal(
        queries.mean(axis=0), np.cov(queries.T, bias=True), size=2_000_000
    )
    drawn = oracle.rotate(drawn, np.full(len(drawn), TOKENS), 100.0)
    keys = oracle.rotate(k[0, :, 0].astype(np.float64), np.arange(TOKENS), 100.0)
    weight = np.array([np.exp(SCALE * (drawn @ key)).mean() for key in keys])
    expected = weight / weight.sum() * np.linalg.norm(v[0, :, 0], axis=1)
    np.testing.assert_allclose(np.exp(score[0, 0, :TOKENS]), expected, rtol=0.02)


@pytest.mark.parametrize("fields", ["start=64", "every=8"])
def test_chunks_do_not_choose_among_equal_keys(rng, fields):
    """As in a first layer, where the keys of a word are the same wherever it stands."""
    spec = Spec(HEADS, 16, 0.25, rotary(16, 100.0))
    policy = parse_policy(f"keydiff:capacity=20,keys=unrotated,budgets=adaptive,{fields}")
    words = rng.integers(0, 9, 60)
    tokens = chunk(spec, 60, rng=rng)
    tokens = tokens._replace(k=tokens.k[:, words])
    states = [state_after(policy, spec, tokens, size) for size in (1, 7, 16, 60)]
    kept = [cached(policy, spec, state) for state in states]
    assert kept.count(kept[0]) == len(kept)
