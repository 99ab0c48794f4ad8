"""Layers of one policy share the leaves that are equal in all of them."""

import jax

from jaxkv import Spec
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import NoPosition
from jaxkv.serve.engine.model import deduplicate_shared

SPEC = Spec(kv_heads=2, head_dim=4, scale=0.5, encoding=NoPosition())
POLICIES = by_layer(
    "1=window:window=3;4=reservoir:sinks=1,window=3,sample=2;*=streaming:sinks=1,window=4", 5
)


def test_equal_layers_share_one_array():
    rngs = jax.random.split(jax.random.key(0), len(POLICIES))
    states = [p.init(SPEC, 3, rng) for p, rng in zip(POLICIES, rngs, strict=True)]
    shared = deduplicate_shared(POLICIES, states)
    assert shared[0].positions is shared[2].positions and shared[0].count is shared[3].count
    assert shared[1].positions is not shared[0].positions
    assert shared[0].k is not shared[2].k
