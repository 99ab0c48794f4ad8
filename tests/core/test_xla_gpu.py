from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.platform import gpu as xla_gpu


@pytest.mark.parametrize("kv_heads", [None, 3])
def test_scatter_slot_writes_one_slot_of_each_sequence(kv_heads):
    rng = np.random.default_rng(0)
    old = rng.normal(size=(5, 7, 2) if kv_heads is None else (5, kv_heads, 7, 2)).astype("f4")
    fresh = rng.normal(size=(*old.shape[:-2], 1, 2)).astype("f4")
    if kv_heads is None:  # positions [B,S] have no last axis
        old, fresh = old[..., 0], fresh[..., 0]
    slot, hit = np.array([0, 6, 3, 3, 6], "i4"), np.array([True, False, True, False, True])
    expected = old.copy()
    for b in np.flatnonzero(hit):
        of_sequence = expected[b] if kv_heads is None else expected[b].swapaxes(0, 1)
        of_sequence[slot[b]] = fresh[b, 0] if kv_heads is None else fresh[b, :, 0]
    arrays = (jnp.asarray(a) for a in (old, fresh, slot, hit[:, None]))
    np.testing.assert_array_equal(xla_gpu.scatter_slot(*arrays), expected)
