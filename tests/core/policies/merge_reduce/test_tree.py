"""The merge-and-reduce tree: cached tokens, gradients, and how the error falls with its size."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.per_head import Evicted, PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.policies.discrepancy import Halving
from jaxkv.policies.merge_reduce import occupancy, tree
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.policies.merge_reduce.tree import Reducer, absorb
from jaxkv.rotary import NoPosition, rotary
from tests.seldom import seldom

# Section 4 (c) of the reference: streams of unit vectors, each sampled to t tokens.
N, DIM, STREAMS, QUERIES = 8192, 8, 12, 32
SIZES = (16, 32, 64, 128, 256)


@functools.cache
def unit(seed, *shape):
    x = np.random.default_rng(seed).normal(size=(*shape, DIM))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def numerator_error(k, v, weights):
    """Mean over streams and queries of |estimate - truth| / n, weights [streams,S]."""
    q = unit(3, QUERIES)
    every = np.exp(np.einsum("qd,snd->sqn", q, unit(1, STREAMS, N)) / np.sqrt(DIM))
    truth = np.einsum("sqn,snd->sqd", every, unit(2, STREAMS, N))
    kernel = np.exp(np.einsum("qd,snd->sqn", q, k) / np.sqrt(DIM)) * weights[:, None]
    return np.linalg.norm(np.einsum("sqn,snd->sqd", kernel, v) - truth, axis=-1).mean() / N


def error_of_uniform(t):
    random = np.random.default_rng(4)
    chosen = np.stack([random.permutation(N)[:t] for _ in range(STREAMS)])[..., None]
    k, v = (np.take_along_axis(unit(s, STREAMS, N), chosen, axis=1) for s in (1, 2))
    return numerator_error(k, v, np.full((STREAMS, t), N / t))


def error_of_tree(how, t):
    """Levels of t slots; at the end of the stream t/2 tokens remain, all in the last level."""
    shape = TreeSize(levels=int(np.log2(N // t)) + 2, block=t)
    spec = Spec(kv_heads=1, head_dim=DIM, scale=DIM**-0.5, encoding=NoPosition())

    reducer = Reducer(shape, how, False, spec)

    @jax.jit
    def sample_stream(k, v):
        slots = shape.slots
        zeros = jnp.zeros((STREAMS, 1, slots, DIM), jnp.float32)
        sample = PerHeadTokens(zeros, zeros, jnp.zeros((STREAMS, 1, slots), jnp.uint32))
        seeds = jax.random.bits(jax.random.key(0), (STREAMS, 1, 2), jnp.uint32)
        num_evicted = jnp.zeros(STREAMS, jnp.uint32)
        at = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None], (STREAMS, N))
        positions = at.astype(jnp.uint32)[:, None]
        evicted = Evicted(PerHeadTokens(k[:, None], v[:, None], positions), at, at >= 0)
        sample, num_evicted = absorb(reducer, sample, num_evicted, seeds, evicted)
        filled = occupancy.filled_slots(shape, num_evicted[:, None], seeds)[:, :, 0]
        weights = jnp.where(filled, jnp.exp(occupancy.log_weights(shape, num_evicted))[:, None], 0)
        return sample.k[:, 0], sample.v[:, 0], weights[:, 0]

    outputs = sample_stream(*(jnp.asarray(unit(s, STREAMS, N), jnp.float32) for s in (1, 2)))
    return numerator_error(*(np.asarray(a, np.float64) for a in outputs))


def slope(errors):
    return np.polyfit(np.log(SIZES), np.log(errors), 1)[0]


@pytest.mark.parametrize(
    ("how", "min_slope", "max_slope"),
    [
        seldom(Halving("walk", 1.0, 0.25), -1.2, -0.75, id="walk"),
        seldom(Halving("pairs", 1.0, 0.25), -1.2, -0.75, id="pairs"),
        seldom(Halving("walk", 1.0, 541.0), -0.65, -0.35, id="theory"),
        pytest.param(Halving("coin"), -0.7, -0.4, id="coin", marks=pytest.mark.record),
    ],
)
def test_how_fast_the_error_falls(how, min_slope, max_slope, record_property):
    """The theorem claims about 1/t, against 1/sqrt(t) of random sampling. It holds for the
    practical walk; with the theorem's own constant a walk is random sampling."""
    measured = slope([error_of_tree(how, t) for t in SIZES])
    of_uniform = slope([error_of_uniform(t) for t in SIZES])
    record_property("tokens", N)
    record_property("slope", float(measured))
    record_property("slope_of_uniform", float(of_uniform))
    assert min_slope < measured < max_slope and -0.65 < of_uniform < -0.35


LAYOUT = Spec(kv_heads=2, head_dim=1, scale=1.0, encoding=NoPosition())


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_cached_tokens_agree_with_the_occupancy(levels):
    """3,000 tokens, one by one, in blocks of 8. No token is cached twice.

    Each slot represents a range of the stream and caches a token of it. The ranges cover all
    tokens.
    """
    shape, batch, tokens = TreeSize(levels, 8), 2, 3000

    reducer = Reducer(shape, Halving("coin"), False, LAYOUT)
    seeds = jax.random.bits(jax.random.key(3), (batch, 2, 2), jnp.uint32)
    zeros = jnp.zeros((batch, 2, 1, 1))

    def absorb_token(carry, number):
        positions = jnp.full((batch, 2, 1), number, jnp.uint32)
        at = jnp.zeros((batch, 1), jnp.int32)
        evicted = Evicted(PerHeadTokens(zeros, zeros, positions), at, at == 0)
        sample, num_evicted = absorb(reducer, *carry, seeds, evicted)
        weights = jnp.exp(occupancy.log_weights(shape, num_evicted))
        filled = occupancy.filled_slots(shape, num_evicted[:, None], seeds)[:, :, 0]
        return (sample, num_evicted), (sample.positions, filled, weights, num_evicted)

    empty = jnp.zeros((batch, 2, shape.slots, 1))
    begin = PerHeadTokens(empty, empty, jnp.zeros((batch, 2, shape.slots), jnp.uint32))
    _, stacked = jax.jit(lambda c, x: jax.lax.scan(absorb_token, c, x))(
        (begin, jnp.zeros(batch, jnp.uint32)), jnp.arange(tokens, dtype=jnp.uint32)
    )
    positions, filled, weights, num_evicted = map(np.asarray, stacked)
    assert (num_evicted == np.arange(1, tokens + 1)[:, None]).all()
    for after in range(1, tokens + 1):
        for sequence, head in itertools.product(range(batch), range(2)):
            cached = filled[after - 1, sequence, head]
            numbers = positions[after - 1, sequence, head][cached]
            times = weights[after - 1, sequence][cached].round().astype(int)
            order = np.argsort(numbers)
            # Ranges are adjacent, oldest first. The last one may not have its token yet.
            ends = np.cumsum(times[order])
            assert (numbers[order] >= ends - times[order]).all() and (numbers[order] < ends).all()
            assert ends[-1] <= after + times[order][-1] and after - ends[-1] < times.min() + 1


def test_a_stream_continues_when_its_count_is_halved():
    """Eight tokens across the halving of the count, one by one and as a chunk."""
    shape, tokens = TreeSize(3, 8), 8

    reducer = Reducer(shape, Halving("coin"), False, LAYOUT)
    seeds = jax.random.bits(jax.random.key(3), (1, 2, 2), jnp.uint32)
    old, new = np.random.default_rng(1).normal(size=(2, 1, 2, shape.slots, 1)).astype(np.float32)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.uint32), (1, 2, tokens))

    @jax.jit
    def absorb_chunk(state, *token):
        at = jnp.arange(token[2].shape[2], dtype=jnp.int32)[None]
        return absorb(reducer, *state, seeds, Evicted(PerHeadTokens(*token), at, at >= 0))

    arrays = new[:, :, :tokens], new[:, :, :tokens], positions
    num_evicted = jnp.asarray([tree.HALVE_COUNT_AT - np.uint32(3)], jnp.uint32)
    begin = PerHeadTokens(old, old, np.full((1, 2, shape.slots), 9, np.uint32)), num_evicted
    by_chunk, by_token = absorb_chunk(begin, *arrays), begin
    for number in range(tokens):
        by_token = absorb_chunk(by_token, *(leaf[:, :, number : number + 1] for leaf in arrays))
    assert int(by_chunk[1][0]) == int(by_token[1][0]) == int(tree.HALVE_COUNT_AT) // 2 + 5
    for a, b in zip(by_chunk[0], by_token[0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "tokens, local",
    [(5, True), (45, False), (45, True)],
)
def test_gradients_follow_each_token_to_its_slot(tokens, local, rng):
    """Halved by coins, the cached tokens are linear in the stream, so they are their derivative."""
    shape, batch, heads = TreeSize(3, 8), 2, 2
    spec = Spec(heads, 4, 1.0, rotary(4, 100.0))

    reducer = Reducer(shape, Halving("coin"), local, spec)
    seeds = jax.random.bits(jax.random.key(3), (batch, heads, 2), jnp.uint32)

    def evicted_tokens(first, count, num_left):
        positions = jnp.broadcast_to(
            first + jnp.arange(count, dtype=jnp.uint32), (batch, heads, count)
        )
        k, v = jnp.asarray(rng.normal(size=(2, batch, heads, count, 4)), jnp.float32)
        at = jnp.broadcast_to(jnp.arange(num_left, dtype=jnp.int32), (batch, num_left))
        valid = at < jnp.asarray([[num_left], [num_left // 2]])  # fewer in the second sequence
        return Evicted(PerHeadTokens(k, v, positions), at, valid)

    empty = jnp.zeros((batch, heads, shape.slots, 4))
    begin = PerHeadTokens(empty, empty, jnp.zeros((batch, heads, shape.slots), jnp.uint32))
    before = evicted_tokens(0, 21, 21)
    sample, num_evicted = absorb(reducer, begin, jnp.zeros(batch, jnp.uint32), seeds, before)
    new = evicted_tokens(21, tokens + 3, tokens)  # three stay in the window

    def run(k, v, new_k, new_v):
        mine = sample._replace(k=k, v=v), num_evicted, seeds
        evicted = new._replace(tokens=new.tokens._replace(k=new_k, v=new_v))
        after, count = absorb(reducer, *mine, evicted)
        filled = occupancy.filled_slots(shape, count[:, None], seeds)[:, :, 0, :, None]
        return jnp.where(filled, after.k, 0), jnp.where(filled, after.v, 0)

    arrays = (*sample[:2], *new.tokens[:2])
    outputs, back = jax.vjp(run, *arrays)
    weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in outputs]
    for c in (weights, [weights[0], 0 * weights[1]], [0 * weights[0], weights[1]]):
        expected = sum(float(jnp.vdot(a, b)) for a, b in zip(c, outputs, strict=True))
        parts = sum(float(jnp.vdot(a, b)) for a, b in zip(back(tuple(c)), arrays, strict=True))
        assert parts == pytest.approx(expected, abs=1e-3) and abs(expected) > 1e-2
    in_window = np.asarray(back(tuple(weights))[2])[:, :, tokens:]
    assert not in_window.any()


def test_when_the_last_level_is_full_every_multiplicity_doubles():
    size = TreeSize(levels=3, block=8)
    num_evicted = jnp.asarray([31, 32, 33, 47, 48, 63, 64, 2**31 - 1, 2**31], jnp.uint32)
    raised = np.asarray(occupancy.log2_group_size(size, num_evicted))
    assert raised.tolist()[:7] == [0, 1, 1, 1, 1, 1, 2]
    fills = np.asarray(occupancy.filled_per_level(size, num_evicted))
    assert fills[:7].tolist() == [
        [7, 4, 4], [0, 0, 4], [1, 0, 4], [8, 0, 4], [0, 4, 4], [8, 4, 4], [0, 0, 4]
    ]  # fmt: skip
    # Where no group is incomplete, the multiplicities add up to all tokens.
    for m in (32, 34, 46, 48, 62, 64, 2**30):
        count = jnp.asarray([m], jnp.uint32)
        times = 2.0 ** (np.arange(3) + int(occupancy.log2_group_size(size, count)[0]))
        assert np.asarray(occupancy.filled_per_level(size, count))[0] @ times == m


def test_the_count_is_halved_after_two_billion_tokens():
    size = TreeSize(levels=3, block=8)
    at = [tree.HALVE_COUNT_AT - np.uint32(1), tree.HALVE_COUNT_AT // np.uint32(2)]
    before, halved = (jnp.asarray([x], jnp.uint32) for x in at)
    assert int(occupancy.log2_group_size(size, before)[0]) == int(
        occupancy.log2_group_size(size, halved)[0]
    )
    filled = np.asarray(occupancy.filled_per_level(size, halved))[0]
    assert filled.tolist() == [0, 0, 4]
