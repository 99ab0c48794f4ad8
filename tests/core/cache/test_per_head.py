"""Tokens of each KV head: their ranks by age."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.platform import gpu

BATCH, KV_HEADS = 2, 3


def sample_of(rng, slots: int, start: int) -> PerHeadTokens:
    """Slots with distinct positions from `start` on, in random order; positions wrap at 2^32."""
    orders = [rng.permutation(3 * slots)[:slots] for _ in range(BATCH * KV_HEADS)]
    positions = (np.reshape(orders, (BATCH, KV_HEADS, slots)) + start) % 2**32
    values = jnp.zeros((BATCH, KV_HEADS, slots, 4))
    return PerHeadTokens(values, values, jnp.asarray(positions, jnp.uint32))


@pytest.mark.parametrize("start", [0, 2**32 - 300])
@pytest.mark.parametrize("slots", [1, 5, 256, 257, 400])
@pytest.mark.parametrize("filled_heads", [1, KV_HEADS])
def test_ranks_count_the_older_filled_slots(rng, monkeypatch, slots, start, filled_heads):
    """Comparing all pairs, and sorting, which is the default above 256 slots, equal numpy."""
    sample = sample_of(rng, slots, start)
    filled = rng.random((BATCH, filled_heads, slots)) < 0.7
    numbers = (np.asarray(sample.positions, np.int64) - start) % 2**32
    shape = (BATCH, KV_HEADS, slots)
    everywhere = np.broadcast_to(filled, shape)
    expected = np.zeros(shape, np.int32)
    for at in np.ndindex(BATCH, KV_HEADS):
        for slot in range(slots):
            expected[at][slot] = (everywhere[at] & (numbers[at] < numbers[at][slot])).sum()
    for compared in (gpu.slots_compared(), 0, slots):
        monkeypatch.setattr(gpu, "slots_compared", lambda compared=compared: compared)
        actual = jax.jit(lambda s, f: per_head.ranks(s, f))(sample, jnp.asarray(filled))
        assert actual.dtype == jnp.int32
        # The rank of an empty slot is not used.
        np.testing.assert_array_equal(np.asarray(actual)[everywhere], expected[everywhere])
