"""Each workaround computes what its plain form computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk
from jaxkv.platform import cpu as xla_cpu


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_cumsum_is_the_running_sum(rng, size):
    counts = rng.integers(0, 300, size).astype(np.int32)
    np.testing.assert_array_equal(xla_cpu.cumsum(jnp.asarray(counts)), np.cumsum(counts))


@pytest.mark.parametrize("batch", [1, 3])
def test_map_sequences_is_vmap(rng, batch):
    x, at = rng.normal(size=(batch, 5, 2)), rng.integers(0, 5, batch)
    rows = xla_cpu.map_sequences(lambda x, at: x[at], jnp.asarray(x, jnp.float32), jnp.asarray(at))
    np.testing.assert_array_equal(rows, x.astype(np.float32)[np.arange(batch), at])


def test_order_after_changes_no_bit_whatever_was_read(rng):
    """Neither a NaN, an infinity nor a negative zero in the cache may reach the chunk."""
    q, k, v = (jnp.asarray(rng.normal(size=(4, 2, 1, 3)), jnp.float32) for _ in range(3))
    chunk = Chunk(q, k, v, jnp.zeros((4, 2), jnp.uint32), jnp.ones((4, 2), bool))
    read = jnp.asarray([np.nan, -np.nan, -np.inf, -0.0], jnp.float32)[:, None]
    after = jax.jit(xla_cpu.order_after)(chunk, read, read[:, :, None])
    for old, new in zip(chunk, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_argmax_is_the_first_of_the_largest():
    logits = jnp.asarray([[1.0, 3.0, 3.0], [np.nan, 1.0, 2.0], [-2.0, -1.0, -np.inf]])
    index, largest = xla_cpu.argmax(logits)
    assert index.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(largest, [3.0, np.nan, -1.0])
