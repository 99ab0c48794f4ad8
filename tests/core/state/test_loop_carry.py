"""States restored from a compiled loop's carry equal the originals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Spec
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import NoPosition
from jaxkv.state.loop_carry import deduplicate_shared, flatten_heads, restore_heads

SPEC = Spec(kv_heads=2, head_dim=4, scale=0.5, encoding=NoPosition())
POLICIES = by_layer(
    "1=window:window=3;4=reservoir:sinks=1,window=3,sample=2;*=streaming:sinks=1,window=4", 5
)


def states():
    rngs = jax.random.split(jax.random.key(0), len(POLICIES))
    empty = [p.init(SPEC, 3, rng) for p, rng in zip(POLICIES, rngs, strict=True)]
    return tuple(
        jax.tree.map(lambda a, n=n: a + jnp.ones_like(a) * n if a.ndim == 4 else a, state)
        for n, state in enumerate(empty)
    )


def test_equal_layers_share_one_array():
    shared = deduplicate_shared(POLICIES, states())
    assert shared[0].positions is shared[2].positions and shared[0].count is shared[3].count
    assert shared[1].positions is not shared[0].positions
    assert shared[0].k is not shared[2].k


@pytest.mark.parametrize("sharded", [False, True])
def test_restore_heads_is_the_inverse_of_flatten_heads(sharded):
    leaves = states()
    flat = flatten_heads(leaves, sharded)
    assert flat[0].k.ndim == (4 if sharded else 3)
    back = restore_heads(flat, leaves)
    assert jax.tree.structure(back) == jax.tree.structure(leaves)
    for actual, expected in zip(jax.tree.leaves(back), jax.tree.leaves(leaves), strict=True):
        np.testing.assert_array_equal(actual, expected)
