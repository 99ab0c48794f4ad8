"""The queries that expected attention summarises, and its score."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Chunk, Spec
from jaxkv.policies import ExpectedAttention
from jaxkv.rotary import NoPosition, rotary
from tests.core import oracle

TOKENS, SINKS, KV_HEADS, GROUP, HEAD_DIM, SCALE = 40, 3, 2, 3, 8, 0.4


def read(policy, spec, q, k, v, size):
    """The state after a prompt in chunks, with padding before the second sequence's tokens."""
    valid = np.ones((2, TOKENS), bool)
    valid[1, :7] = False
    positions = (np.cumsum(valid, axis=1) - 1).astype(np.uint32)
    update = jax.jit(lambda state, chunk: policy.update(spec, state, chunk)[1])
    state = policy.init(spec, 2, jax.random.key(0))
    for first in range(0, TOKENS, size):
        arrays = (x[:, first : first + size] for x in (q, k, v, positions, valid))
        state = update(state, Chunk(*map(jnp.asarray, arrays)))
    return state


@pytest.fixture
def tokens(rng):
    sizes = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    q, k, v = (rng.normal(size=(2, TOKENS, n, HEAD_DIM)).astype(np.float32) for n in sizes)
    return q + np.float32(30), k, v


@pytest.mark.parametrize("size", [1, 8, TOKENS])
def test_mean_and_covariance_are_those_of_the_queries_after_the_sinks(tokens, size):
    """A mean that is thirty times the deviation loses no digits of the covariance."""
    spec = Spec(KV_HEADS, HEAD_DIM, SCALE, NoPosition(), group=GROUP)
    state = read(ExpectedAttention(9, SINKS, start=64), spec, *tokens, size)
    for sequence, skipped in ((0, 0), (1, 7)):
        q = tokens[0][sequence, skipped + SINKS :].astype(np.float64)
        for head in range(KV_HEADS * GROUP):
            at = sequence, head // GROUP, slice(None), head % GROUP
            np.testing.assert_allclose(state.mean[at][0], q[:, head].mean(axis=0), rtol=1e-6)
            expected = np.cov(q[:, head].T, bias=True)
            np.testing.assert_allclose(state.covariance[at], expected, rtol=2e-5, atol=1e-5)


def test_the_score_is_the_expectation_over_normal_queries(rng):
    """By sampling: the mean of exp(logit) over two million queries, rotated to the one position
    that is asked for, over its sum; times the length of the value."""
    spec = Spec(1, HEAD_DIM, SCALE, rotary(HEAD_DIM, 100.0), group=1)
    policy = ExpectedAttention(9, 0, future=1, start=64)
    mix = 0.5 * rng.normal(size=(HEAD_DIM, HEAD_DIM))
    q = (rng.normal(size=(2, TOKENS, 1, HEAD_DIM)) @ mix + 0.3).astype(np.float32)
    k, v = (rng.normal(size=(2, TOKENS, 1, HEAD_DIM)).astype(np.float32) for _ in range(2))
    state = read(policy, spec, q, k, v, TOKENS)
    prompt = state.prompt.dense
    positions = jnp.broadcast_to(prompt.positions[:, None], (2, 1, 64))
    score = policy._score(spec, state, PerHeadTokens(prompt.k, prompt.v, positions), prompt.count)
    queries = q[0, :, 0].astype(np.float64)
    drawn = rng.multivariate_normal(
        queries.mean(axis=0), np.cov(queries.T, bias=True), size=2_000_000
    )
    drawn = oracle.rotate(drawn, np.full(len(drawn), TOKENS), 100.0)
    keys = oracle.rotate(k[0, :, 0].astype(np.float64), np.arange(TOKENS), 100.0)
    weight = np.array([np.exp(SCALE * (drawn @ key)).mean() for key in keys])
    expected = weight / weight.sum() * np.linalg.norm(v[0, :, 0], axis=1)
    np.testing.assert_allclose(np.exp(score[0, 0, :TOKENS]), expected, rtol=0.02)
