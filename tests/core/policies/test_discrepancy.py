"""Halving blocks of tokens: exact sizes, and the error against uniform sampling.

The practical walk has a smaller error than uniform sampling. The walk with the theorem's constant
does not. The bounds come from an independent numpy implementation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.evals.balancekv.single_layer import certain
from jaxkv.policies.discrepancy import MODES, Halving, halve

SEEDS, TOKENS, HEAD_DIM, BLOCK, QUERIES = 10, 2048, 64, 256, 128
PRACTICAL = Halving("walk", 0.1)  # the practical walk
# The theorem's c = 30 log(n / delta) with delta 1/n, for vectors of length 1 at most. Its signs are
# almost fair coins.
THEORY = Halving("walk", 1.0, 457.0)


def walks(tokens, order, seed):
    """Keys and values of an AR(1) process, coefficient 0.95, unit variance; ordered or permuted."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(2, tokens, HEAD_DIM))
    x = np.zeros_like(noise)
    x[:, 0] = noise[:, 0]
    for i in range(1, tokens):
        x[:, i] = 0.95 * x[:, i - 1] + np.sqrt(1 - 0.95**2) * noise[:, i]
    return x if order == "ordered" else x[:, random.permutation(tokens)]


@functools.cache
def streams(order):
    """k, v [seeds,n,d], queries, and their full attention."""
    k, v = np.stack([walks(TOKENS, order, seed) for seed in range(SEEDS)], axis=1)
    q = np.random.default_rng(99).normal(size=(QUERIES, HEAD_DIM))
    return k, v, q, attention(q, k, v)


def attention(q, k, v):
    logits = np.einsum("th,bsh->bts", q, k) / np.sqrt(HEAD_DIM)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("bts,bsh->bth", weights / weights.sum(axis=-1, keepdims=True), v)


def error(order, chosen):
    """Mean relative error over the seeds of attention to `chosen` [seeds,n/2]."""
    k, v, q, exact = streams(order)
    half = [np.take_along_axis(a, chosen[..., None], axis=1) for a in (k, v)]
    off = attention(q, *half) - exact
    norm = lambda a: np.sqrt((a**2).sum(axis=(1, 2)))
    return (norm(off) / norm(exact)).mean()


@functools.cache
def error_of_uniform(order):
    random = np.random.default_rng(5)
    chosen = [random.permutation(TOKENS)[: TOKENS // 2] for _ in range(SEEDS)]
    return error(order, np.stack(chosen))


def halved(how, order, seed=0):
    k, v, _, _ = streams(order)
    split = lambda a: jnp.asarray(a.reshape(SEEDS, -1, BLOCK, HEAD_DIM), jnp.float32)
    uniforms = np.random.default_rng(seed).random((SEEDS, TOKENS // BLOCK, BLOCK))
    scale = HEAD_DIM**-0.5
    done = jax.jit(functools.partial(halve, how, scale))(
        split(k), split(v), jnp.asarray(uniforms, jnp.float32)
    )
    first = BLOCK * np.arange(TOKENS // BLOCK)[None, :, None]
    return (np.asarray(done.chosen) + first).reshape(SEEDS, -1), np.asarray(done.inner)


# Bounds of the error of each halving, divided by that of uniform sampling (reference, 4 a).
RATIOS = {
    "walk": (PRACTICAL, {"ordered": (0.0, 0.35), "permuted": (0.0, 0.80)}),
    "pairs": (Halving("pairs", 0.1), {"ordered": (0.0, 0.35), "permuted": (0.0, 0.80)}),
    "coin": (Halving("coin"), {"ordered": (0.0, 0.40), "permuted": (0.90, 1.12)}),
    "theory": (THEORY, {"ordered": (0.90, 1.10), "permuted": (0.90, 1.10)}),
}


@pytest.mark.parametrize("order", ["ordered", "permuted"])
@pytest.mark.parametrize("name", RATIOS)
def test_error_beside_uniform(name, order, record_property):
    how, bounds = RATIOS[name]
    ratio = error(order, halved(how, order)[0]) / error_of_uniform(order)
    record_property("ratio", float(ratio))
    low, high = bounds[order]
    assert low <= ratio <= high


def test_the_share_of_signs_without_randomness():
    """About half the signs of the practical walk are certain; with the theorem's constant, none."""
    saturated = lambda how: np.mean(certain(jnp.asarray(halved(how, "ordered")[1])))
    assert 0.4 < saturated(PRACTICAL) < 0.8
    assert saturated(THEORY) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 2, 14, 16])
def test_exactly_half_of_the_tokens_stay(mode, count):
    random = np.random.default_rng(1)
    k, v = (jnp.asarray(random.normal(size=(50, 16, 8)), jnp.float32) for _ in range(2))
    k = k.at[:, count:].set(jnp.nan)  # padding may have any values
    uniforms = jnp.asarray(random.random((50, 16)), jnp.float32)
    counts = jnp.full(50, count, jnp.int32)
    chosen = np.asarray(halve(Halving(mode), 8**-0.5, k, v, uniforms, counts).chosen)
    assert chosen.shape == (50, 8)
    for row in chosen[:, : count // 2]:
        assert len(set(row)) == count // 2 and (np.diff(row) > 0).all()
        assert row.size == 0 or (row.min() >= 0 and row.max() < count)


@pytest.mark.parametrize("mode", MODES)
def test_each_token_stays_half_of_the_time(mode):
    """The distribution is symmetric in the signs; within four standard errors of 4,000 draws."""
    random = np.random.default_rng(2)
    k, v = (jnp.asarray(random.normal(size=(1, 12, 8)), jnp.float32) for _ in range(2))
    uniforms = jnp.asarray(random.random((4000, 12)), jnp.float32)
    wide = lambda a: jnp.broadcast_to(a, (4000, 12, 8))
    chosen = np.asarray(halve(Halving(mode), 8**-0.5, wide(k), wide(v), uniforms).chosen)
    share = np.bincount(chosen.ravel(), minlength=12) / 4000
    assert np.abs(share - 0.5).max() < 4 * 0.5 / np.sqrt(4000)


def test_an_odd_block_is_refused():
    odd = jnp.zeros((1, 5, 8))
    with pytest.raises(UserError, match="must be even to be halved, got 5"):
        halve(Halving(), 1.0, odd, odd, jnp.zeros((1, 5)))
