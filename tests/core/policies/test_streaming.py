"""StreamingLLM: the paper's worked example, and how the published code differs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.errors import UserError
from jaxkv.policies import Streaming
from jaxkv.rotary import rotary
from tests.core import oracle

THETA = 100.0
SPEC = Spec(kv_heads=1, head_dim=8, scale=8**-0.5, encoding=rotary(8, THETA))


def chunk(rng, start, length):
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, n, 8)), jnp.float32) for n in (2, 1, 1))
    positions = jnp.arange(start, start + length, dtype=jnp.uint32)[None]
    return Chunk(q, k, v, positions, jnp.ones((1, length), bool))


@functools.partial(jax.jit, static_argnums=0)
def update(policy, state, tokens):
    return policy.update(SPEC, state, tokens)


def feed(policy, *chunks):
    """The state after the chunks."""
    state = policy.init(SPEC, 1, jax.random.key(0))
    for tokens in chunks:
        _, state = update(policy, state, tokens)
    return state


def cached(policy, state):
    """The cached positions, in order."""
    tokens = policy.cached(SPEC, state)
    return sorted(np.asarray(tokens.positions)[np.asarray(tokens.log_weight) == 0].tolist())


def padded(tokens):
    """The same tokens and one of padding, so that the code for longer chunks runs."""
    return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, 0), (0, 1)] + [(0, 0)] * (leaf.ndim - 2)),
                       tokens)  # fmt: skip


def outputs(policy, state, new):
    """The output of one new token: as a chunk of one token, and within a longer chunk."""
    return [update(policy, state, tokens)[0].out[:, :1] for tokens in (new, padded(new))]


def test_figure_4(rng):
    # Tokens 0 1 2 3 6 7 8 are cached while token 9 is decoded. Their cache-relative positions are
    # 0 to 6, and that of token 9 is 7.
    policy = Streaming(sinks=4, window=4)
    past, new = chunk(rng, 0, 9), chunk(rng, 9, 1)
    state = feed(policy, past)
    _, after = update(policy, state, new)
    assert cached(policy, after) == [0, 1, 2, 3, 6, 7, 8, 9]
    k, v = (
        np.concatenate([a[0, :, 0], b[0, :, 0]])[[0, 1, 2, 3, 6, 7, 8, 9]]
        for a, b in ((past.k, new.k), (past.v, new.v))
    )
    keys = oracle.rotate(k.astype(np.float64), np.arange(8), THETA)
    query = oracle.rotate(np.asarray(new.q, np.float64)[0, 0], np.full(2, 7), THETA)
    weights = np.exp(query @ keys.T * SPEC.scale)
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    for out in outputs(policy, state, new):
        np.testing.assert_allclose(out[0, 0], expected, atol=1e-6)


def test_the_published_code_sees_one_key_more(rng):
    # It evicts after attending, so a query sees S + W cached tokens and its own. A window that is
    # larger by one gives the same.
    sinks, window = 2, 3
    past, new = chunk(rng, 0, 9), chunk(rng, 9, 1)
    narrow, wider = Streaming(sinks, window), Streaming(sinks, window + 1)
    published = [0, 1, 6, 7, 8]  # cached after nine tokens
    assert cached(narrow, feed(narrow, past)) == published
    assert cached(narrow, feed(narrow, past, new)) == [0, 1, 7, 8, 9]
    assert cached(wider, feed(wider, past, new)) == [*published, 9]
    pairs = (outputs(p, feed(p, past), new) for p in (narrow, wider))
    for narrow_out, wider_out in zip(*pairs, strict=True):
        assert np.abs(np.asarray(narrow_out - wider_out)).max() > 1e-3


def test_cache_relative_and_absolute_positions_differ_after_the_first_eviction(rng):
    past, new = chunk(rng, 0, 12), chunk(rng, 12, 1)
    cache, absolute = Streaming(2, 3), Streaming(2, 3, "absolute")
    pairs = (outputs(p, feed(p, past), new) for p in (cache, absolute))
    for first_out, second_out in zip(*pairs, strict=True):
        assert np.abs(np.asarray(first_out - second_out)).max() > 1e-3
    early, late = chunk(rng, 0, 4), chunk(rng, 4, 1)
    pairs = (outputs(p, feed(p, early), late) for p in (cache, absolute))
    for first_out, second_out in zip(*pairs, strict=True):
        np.testing.assert_allclose(first_out, second_out, atol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"sinks": -1}, "sinks must be 0 or more, got -1"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Streaming(**fields)
