"""StreamingLLM: the paper's worked example, and rings with large masks and shorter windows."""

import jax
import numpy as np
import pytest

from jaxkv import attention
from jaxkv.cache import ring
from jaxkv.contract import Spec
from jaxkv.policies import Streaming
from jaxkv.rotary import Alibi, rotary
from tests.core import oracle
from tests.core.tokens import chunk, cut

THETA = 100.0
SPEC = Spec(kv_heads=1, head_dim=8, scale=8**-0.5, encoding=rotary(8, THETA), group=2)


def test_figure_4(rng):
    """Tokens 0 1 2 3 6 7 8 are cached while token 9 is decoded.

    Their cache-relative positions are 0 to 6, and that of token 9 is 7.
    """
    policy = Streaming(sinks=4, window=4)
    update = jax.jit(lambda state, tokens: policy.update(SPEC, state, tokens))
    past, new = chunk(SPEC, 9, rng=rng), chunk(SPEC, 1, 9, rng=rng)
    _, state = update(policy.init(SPEC, 1, jax.random.key(0)), past)
    partial, state = update(state, new)
    kept = [0, 1, 2, 3, 6, 7, 8, 9]
    assert sorted(policy.cached(SPEC, state).positions[0].ravel().tolist()) == kept
    k, v = (
        np.concatenate([a[0, :, 0], b[0, :, 0]])[kept]
        for a, b in ((past.k, new.k), (past.v, new.v))
    )
    keys = oracle.rotate(k.astype(np.float64), np.arange(8), THETA)
    query = oracle.rotate(np.asarray(new.q, np.float64)[0, 0], np.full(2, 7), THETA)
    weights = np.exp(query @ keys.T * SPEC.scale)
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(partial.out[0, 0], expected, atol=1e-6)


@pytest.mark.parametrize("encoding", [rotary(8, 100.0), Alibi.of(4)])
def test_a_mask_computed_by_blocks_equals_the_whole_mask(rng, monkeypatch, encoding):
    policy = Streaming(3, 30)
    spec = Spec(kv_heads=2, head_dim=8, scale=0.4, encoding=encoding, group=2)
    tokens = chunk(spec, 45, rng=rng, valid=rng.random((2, 45)) < 0.9)
    first, then = cut(tokens, 0, 38), cut(tokens, 38)
    state = policy.init(spec, 2, jax.random.key(0))
    _, state = jax.jit(lambda state: policy.update(spec, state, first))(state)
    update = lambda: jax.jit(lambda state: policy.update(spec, state, then)[0])(state)
    expected_leaves = update()
    monkeypatch.setattr(ring, "_WHOLE_MASK", 0)
    monkeypatch.setattr(attention, "_BLOCK_SLOTS", 4)
    for actual, expected in zip(update(), expected_leaves, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_window_shorter_than_the_ring_is_the_same_in_chunks_and_in_single_tokens(rng):
    spec = Spec(kv_heads=2, head_dim=8, scale=0.4, encoding=rotary(8, 100.0), group=2)
    settings = ring.RingSettings(sinks=2, window=6)
    tokens = chunk(spec, 40, rng=rng)
    update = jax.jit(lambda state, chunk: ring.update(spec, state, chunk, settings))
    outputs = []
    for size in (5, 1):
        state, outs = ring.init(spec, 1, slots=16), []
        for at in range(0, 40, size):
            partial, state = update(state, cut(tokens, at, at + size))
            outs.append(partial.out)
        outputs.append(np.concatenate(outs, axis=1))
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)
