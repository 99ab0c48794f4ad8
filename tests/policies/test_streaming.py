"""StreamingLLM's worked example, and where the published code differs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import attention
from jaxkv.cache import ring
from jaxkv.contract import Chunk, Spec
from jaxkv.errors import UserError
from jaxkv.policies import Streaming
from jaxkv.rotary import Alibi, rotary
from tests import oracle

THETA = 100.0
SPEC = Spec(kv_heads=1, head_dim=8, scale=8**-0.5, encoding=rotary(8, THETA))


def chunk(rng, start, length):
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, n, 8)), jnp.float32) for n in (2, 1, 1))
    positions = jnp.arange(start, start + length, dtype=jnp.uint32)[None]
    return Chunk(q, k, v, positions, jnp.ones((1, length), bool))


@functools.partial(jax.jit, static_argnums=0)
def update(policy, state, tokens):
    return policy.update(SPEC, state, tokens)


def read(policy, *chunks):
    state = policy.init(SPEC, 1, jax.random.key(0))
    for tokens in chunks:
        _, state = update(policy, state, tokens)
    return state


def kept(policy, state):
    held = policy.cached(SPEC, state)
    return sorted(np.asarray(held.positions)[np.asarray(held.log_weight) == 0].tolist())


def test_figure_4(rng):
    # The cache holds tokens 0 1 2 3 6 7 8 while token 9 is decoded; their positions inside the
    # cache are 0 to 6 and token 9 stands at 7.
    policy = Streaming(sinks=4, window=4)
    past, new = chunk(rng, 0, 9), chunk(rng, 9, 1)
    state = read(policy, past)
    partial, after = update(policy, state, new)
    assert kept(policy, after) == [0, 1, 2, 3, 6, 7, 8, 9]
    k, v = (
        np.concatenate([a[0, :, 0], b[0, :, 0]])[[0, 1, 2, 3, 6, 7, 8, 9]]
        for a, b in ((past.k, new.k), (past.v, new.v))
    )
    keys = oracle.rotate(k.astype(np.float64), np.arange(8), THETA)
    query = oracle.rotate(np.asarray(new.q, np.float64)[0, 0], np.full(2, 7), THETA)
    weights = np.exp(query @ keys.T * SPEC.scale)
    wanted = weights @ v / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(partial.out[0, 0], wanted, atol=1e-6)
    # In a chunk of two, of which one is padding, the token takes the path of chunks.
    two = jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), new)
    two = two._replace(valid=jnp.array([[True, False]]))
    chunked, _ = update(policy, state, two)
    np.testing.assert_allclose(chunked.out[0, 0], wanted, atol=1e-6)


def test_the_published_code_sees_one_key_more(rng):
    # It evicts after attending: S + W kept and the new token beside them. That is our window
    # of one more, and only that.
    sinks, window = 2, 3
    past, new = chunk(rng, 0, 9), chunk(rng, 9, 1)
    ours, wider = Streaming(sinks, window), Streaming(sinks, window + 1)
    published = [0, 1, 6, 7, 8]  # kept after nine tokens
    assert kept(ours, read(ours, past)) == published
    assert kept(ours, read(ours, past, new)) == [0, 1, 7, 8, 9]
    assert kept(wider, read(wider, past, new)) == [*published, 9]
    one, other = (update(p, read(p, past), new)[0].out for p in (ours, wider))
    assert np.abs(np.asarray(one - other)).max() > 1e-3


def test_positions_differ_once_something_is_evicted(rng):
    past, new = chunk(rng, 0, 12), chunk(rng, 12, 1)
    cache, absolute = Streaming(2, 3), Streaming(2, 3, "absolute")
    one, other = (update(p, read(p, past), new)[0].out for p in (cache, absolute))
    assert np.abs(np.asarray(one - other)).max() > 1e-3
    early, late = chunk(rng, 0, 4), chunk(rng, 4, 1)
    one, other = (update(p, read(p, early), late)[0].out for p in (cache, absolute))
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sinks": -1}, "sinks must be 0 or more, got -1"),
    ],
)
def test_settings_that_mean_nothing(fields, told):
    with pytest.raises(UserError, match=told):
        Streaming(**fields)


@pytest.mark.parametrize("encoding", [rotary(8, 100.0), Alibi.of(4)])
def test_masks_by_block_are_the_mask(rng, monkeypatch, encoding):
    """A mask too large to stand whole is made a block of slots at a time."""
    policy = Streaming(3, 30)
    spec = Spec(kv_heads=2, head_dim=8, scale=0.4, encoding=encoding)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 45, n, 8)), jnp.float32) for n in (4, 2, 2))
    positions = jnp.broadcast_to(jnp.arange(45, dtype=jnp.uint32), (2, 45))
    valid = jnp.asarray(rng.random((2, 45)) < 0.9)
    tokens = Chunk(q, k, v, positions, valid)
    first, then = (jax.tree.map(lambda a, s=s: a[:, s], tokens) for s in (slice(38), slice(38, 45)))
    state = policy.init(spec, 2, jax.random.key(0))
    state = jax.jit(lambda state: policy.update(spec, state, first)[1])(state)
    attend = lambda: jax.jit(lambda state: policy.update(spec, state, then)[0])(state)  # noqa: E731
    whole = attend()
    monkeypatch.setattr(ring, "_WHOLE_MASK", 0)
    monkeypatch.setattr(attention, "_BLOCK_SLOTS", 4)
    for one, other in zip(attend(), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
