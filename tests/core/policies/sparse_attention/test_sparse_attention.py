"""Oracle baselines that select among all keys: theorems, published figures, bad settings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import draws
from jaxkv.contract import Spec
from jaxkv.policies import Oracle, Quest, TopK, VAttention
from jaxkv.policies.sparse_attention import base as sparse_attention
from tests.core.laws.cases import ROTARY, SCALE


def candidates(logits, times=1, *, seed=0, ends=0):
    """The same logits for `times` queries. All of them attend to the last `ends` keys."""
    logits = jnp.asarray(logits, jnp.float32)
    shape = (1, 1, 1, times, logits.size)
    between = jnp.arange(logits.size) < logits.size - ends
    between = jnp.broadcast_to(between, shape)
    return sparse_attention.Candidates(
        jnp.broadcast_to(logits, shape), ~between, between,
        jnp.zeros((1, times, 1, 4)), jnp.zeros((1, 1, logits.size, 4)),
        jnp.arange(times, dtype=jnp.uint32)[None], jnp.arange(logits.size, dtype=jnp.uint32)[None],
        draws.seeds(jax.random.key(seed), Spec(1, 4, 1.0, ROTARY), 1),
    )  # fmt: skip


def softmax(logits):
    e = np.exp(np.asarray(logits, np.float64))
    return e / e.sum()


def count_draws(share, logits, times):
    """How often each key is drawn by each query, [times,S], and how many draws a query has."""
    counts, budget = jax.jit(Oracle(share).draw)(candidates(logits, times))
    return np.asarray(counts)[0, 0, 0], int(budget[0, 0, 0, 0, 0])


@pytest.mark.parametrize("budget", [4, 16, 64])
def test_theorem_3_2_the_variance_of_oracle_sampling(rng, budget):
    """tr Cov = (E|v|^2 - |o|^2) / B, and the mean is the attention."""
    logits, values, times = rng.normal(size=128), rng.normal(size=(128, 8)) + 1, 4000
    w = softmax(logits)
    counts, drawn = count_draws(budget / 128, logits, times)
    assert drawn == budget and (counts.sum(axis=1) == budget).all() and (counts >= 0).all()
    outs = counts @ values / budget
    exact = w @ values
    trace = (w @ (values**2).sum(axis=1) - (exact**2).sum()) / budget
    assert abs(outs.var(axis=0).sum() / trace - 1) < 0.04
    assert (np.abs(outs.mean(axis=0) - exact) < 4 * outs.std(axis=0) / times**0.5).all()


def test_theorem_3_3_the_number_of_keys_drawn(rng):
    """E|S| = sum(1 - (1-w)^B) <= 1 + B eps - eps^B <= 1 + B eps."""
    for case in range(60):
        logits = rng.normal(size=40) * rng.uniform(0, 6)
        budget = int(rng.integers(1, 40))
        w = softmax(logits)
        expected, eps = (1 - (1 - w) ** budget).sum(), 1 - w.max()
        assert expected <= 1 + budget * eps - eps**budget + 1e-12 <= 1 + budget * eps + 2e-12
        if case % 6 == 0:
            counts, drawn = count_draws(budget / 40, logits, 3000)
            unique = (counts > 0).sum(axis=1)
            assert drawn == budget
            assert abs(unique.mean() - expected) <= 4 * unique.std() / 3000**0.5 + 1e-9


def test_equation_5_is_the_mean_of_the_drawn_values(rng):
    """The weighted keys give the mean of the drawn values, and the log-sum-exp of all keys."""
    logits, values, ends = rng.normal(size=50) * 2, rng.normal(size=(50, 4)), 5
    queries = candidates(logits, 20, ends=ends)
    counts, _ = (np.asarray(a) for a in Oracle(0.3).draw(queries))
    bias = np.asarray(Oracle(0.3).select(queries), np.float64)[0, 0, 0]
    lse = np.log(np.exp(logits[:-ends]).sum())
    for times, weight in zip(counts[0, 0, 0], bias, strict=True):
        e = np.exp(logits + weight)
        plain = np.repeat(values, times, axis=0).mean(axis=0)
        np.testing.assert_allclose(e @ values / e.sum(), plain, atol=2e-6)
        assert abs(np.log(e.sum()) - lse) < 2e-6


def test_decimal_shares_are_rounded_up_exactly():
    """A tenth of 30 is 3, although 0.1 has no exact binary form."""
    count = np.arange(1000)
    among = jnp.asarray(np.arange(1000) < count[:, None])
    for share, parts in ((0.1, 10), (0.05, 20), (1 / 3, 3), (1e-9, 10**9), (1.0, 1)):
        actual = sparse_attention.share_of(share, among)[:, 0]
        np.testing.assert_array_equal(actual, -(-count // parts))


def test_quest_bounds_every_logit_of_a_page(rng):
    q, k = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(2, 2, 37, 8))
    products = np.einsum("btkgh,bksh->bkgts", q.reshape(2, 3, 2, 2, 8), k)
    between = np.broadcast_to((np.arange(37) >= 3) & (np.arange(37) < 34), (2, 1, 1, 3, 37))
    a = candidates(np.zeros(37))._replace(
        logits=jnp.asarray(products, jnp.float32), selectable=jnp.asarray(between),
        q=jnp.asarray(q, jnp.float32), k=jnp.asarray(k, jnp.float32),
    )  # fmt: skip
    bound, valid = Quest(page=5).bound(a)
    assert bound.shape == (2, 2, 2, 3, 8)
    assert np.asarray(valid)[0, 0, 0, 0].tolist() == [True] * 7 + [False]
    largest = np.where(between, products, -np.inf)
    for page in range(7):
        best = largest[..., 5 * page : 5 * page + 5].max(axis=-1)
        assert (best <= np.asarray(bound)[..., page] + 1e-5).all()
    # With pages of one token the bound is the logit, so quest is top-k.
    token_bound, _ = Quest(page=1).bound(a)
    np.testing.assert_allclose(token_bound, np.where(between, products, 0), atol=1e-5)
    selections = [np.asarray(p.select(a)) for p in (Quest(0.3, 1, 1), TopK(0.3))]
    np.testing.assert_array_equal(*selections)


def sums(rule, times):
    """For 4,096 lognormal weights (sigma 1.5): the estimated sum divided by the true sum, and the
    number of sampled keys without the largest."""
    logits = np.random.default_rng(5).normal(size=4096) * 1.5
    select = jax.jit(rule.select)
    bias = np.concatenate(
        [
            np.asarray(select(candidates(logits, 20, seed=n)), np.float64)[0, 0, 0]
            for n in range(times)
        ]
    )
    return np.exp(logits + bias).sum(axis=1) / np.exp(logits).sum(), (bias > 0).sum(axis=1)


def test_vattention_fails_with_probability_delta():
    """With the two-sided quantile, 1.960 instead of 1.645. Budgets scale with its square."""
    two_sided, one_sided = (
        sums(VAttention(0.02, 0.02, 0.1, 0.05, sides), 20) for sides in ("two", "one")
    )
    fails = [(np.abs(ratio - 1) > 0.1).mean() for ratio, _ in (two_sided, one_sided)]
    assert fails[0] < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5 and fails[1] > max(0.065, fails[0])
    assert abs(two_sided[1].mean() / one_sided[1].mean() / (1.95996 / 1.64485) ** 2 - 1) < 0.05
    assert abs(two_sided[0].mean() - 1) < 0.01


def test_reserve_counts_tokens_from_the_end_of_prefill():
    spec, chosen = Spec(2, 8, SCALE, ROTARY), TopK(start=4)
    state = chosen.reserve(spec, chosen.init(spec, 2, jax.random.key(0)), 12)
    assert state.dense.positions.shape[1] == 16
    finished = chosen.finish_prefill(spec, state)
    for tokens, slots in ((1, 32), (16, 32), (17, 64)):
        grow = functools.partial(chosen.reserve, spec, tokens=tokens)
        assert jax.eval_shape(grow, finished).dense.positions.shape[1] == slots
        finished = grow(finished)
    assert finished.dense.positions.shape[1] == 64
