"""What the notebook on MagicPIG computes, against plain numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from evals import heads, long_tail
from evals.single_layer import QUERIES
from jaxkv.contract import Spec
from jaxkv.rotary import NoPosition

SPEC = Spec(2, 8, 8**-0.5, NoPosition(), group=2)
LENGTH = QUERIES + 120


@pytest.fixture
def layer(rng):
    shape = (2, LENGTH, 2, 8)
    q, k, v = rng.normal(size=(2, LENGTH, 4, 8)), rng.normal(size=shape), rng.normal(size=shape)
    return heads.Layer(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))


def weights(layer):
    """Of the last queries [B,Q,N,S], in plain numpy."""
    q, k = (np.asarray(x, np.float64) for x in (layer.q[:, -QUERIES:], layer.k))
    logits = np.einsum("bqnh,bsnh->bqns", q, np.repeat(k, 2, axis=2)) * SPEC.scale
    own = np.arange(LENGTH - QUERIES, LENGTH)[:, None]
    logits = np.where((np.arange(LENGTH) <= own)[:, None], logits, -np.inf)
    found = np.exp(logits - logits.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def test_tails_add_up_the_heaviest(layer):
    found = long_tail.tails(SPEC, layer)
    wanted = np.cumsum(-np.sort(-weights(layer), axis=-1), axis=-1).mean(axis=(0, 1))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert long_tail.sink(SPEC, layer) == pytest.approx(weights(layer)[..., 0].mean(), abs=1e-6)


def test_reading_all_leaves_no_error(layer):
    found = long_tail.budgets(SPEC, layer, [0.1, 1.0], 1)
    assert found["topk"][1].error < 1e-5 and found["topk"][1].share == pytest.approx(1)
    assert all(one.error > 0.01 for line in found.values() for one in line[:1])


def test_cosines_are_of_keys_less_their_mean(layer):
    moved = layer._replace(k=layer.k + jnp.asarray(3.0, jnp.float32))
    kept = long_tail.cosines(SPEC, moved, True)
    np.testing.assert_allclose(
        np.sort(kept), np.sort(long_tail.cosines(SPEC, layer, True)), atol=1e-4
    )
    assert not np.allclose(kept, long_tail.cosines(SPEC, moved, False), atol=0.1)


def test_more_tables_read_more(layer):
    found = long_tail.tables(SPEC, {0: layer}, [(6, 10), (4, 40)], 1)
    assert found[6, 10, True].share < found[4, 40, True].share
    assert len(long_tail.told(found, LENGTH).splitlines()) == 3
