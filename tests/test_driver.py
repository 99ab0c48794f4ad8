"""`step` says what is wrong with what it is given, and not from the depth of a product."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.driver import step
from jaxkv.policies import Window
from jaxkv.rotary import NoPosition
from jaxkv.state.sharding import mesh_of, sharded_step

SPEC = jaxkv.Spec(kv_heads=2, head_dim=8, scale=1.0, encoding=NoPosition())
POLICY = jaxkv.policy("window:window=4")


class Other(tuple):
    """The state of another policy."""


def given(batch=1, tokens=3, heads=4):
    """Arguments that agree."""
    q, kv = jnp.ones((batch, tokens, heads, 8)), jnp.ones((batch, tokens, 2, 8))
    positions = jnp.zeros((batch, tokens), jnp.uint32)
    state = POLICY.init(SPEC, batch, jax.random.key(0))
    return {"policy": POLICY, "spec": SPEC, "state": state, "q": q, "k": kv, "v": kv,
            "positions": positions, "valid": jnp.ones((batch, tokens), bool)}  # fmt: skip


BAD = {
    "a policy as text": ({"policy": "window"}, r"a policy is a value .* got 'window'"),
    "heads that do not divide": ({"q": jnp.ones((1, 3, 3, 8))}, r"multiple .*kv_heads=2.*3, 3, 8"),
    "no tokens": ({"q": jnp.ones((1, 0, 4, 8))}, "T at least 1"),
    "another head dim": ({"q": jnp.ones((1, 3, 4, 6))}, r"q must be \(1, 3, 4, 8\)"),
    "other tokens": (
        {"k": jnp.ones((1, 2, 2, 8))},
        r"k must be \(1, 3, 2, 8\)",
    ),
    "other kv heads": ({"v": jnp.ones((1, 3, 4, 8))}, r"v must be \(1, 3, 2, 8\)"),
    "one position": ({"positions": jnp.zeros((1, 1), jnp.uint32)}, r"positions must be \(1, 3\)"),
    "valid of a row": ({"valid": jnp.ones((3, 1), bool)}, r"valid must be \(1, 3\)"),
    "another state": ({"state": Other()}, "a Ring, got a Other; begin with policy.init"),
    "other rows": ({"state": POLICY.init(SPEC, 2, jax.random.key(0))}, "B=1, got B=2; begin with"),
    "another head dim of the state": (
        {"state": POLICY.init(replace(SPEC, head_dim=4), 1, jax.random.key(0))},
        "H=8, got H=4",
    ),
    "positions as numbers": (
        {"positions": jnp.zeros((1, 3))},
        "positions must be uint32, got float32",
    ),
    "valid as numbers": ({"valid": jnp.ones((1, 3))}, "valid must be bool, got float32"),
    "a sink for each kv head": ({"sink": jnp.zeros(2)}, r"sink must be \(4,\)"),
    "the class of a policy": ({"policy": Window}, "a policy is a value"),
}


def test_what_agrees_is_taken():
    out, _ = step(**given())
    assert out.shape == (1, 3, 4, 8)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_is_refused(name):
    changed, words = BAD[name]
    # Underneath the checks of types that the tests put around every function of jaxkv.
    on_a_mesh = partial(inspect.unwrap(sharded_step), mesh_of("model=2"))
    for call in (inspect.unwrap(step), on_a_mesh):
        with pytest.raises(jaxkv.UserError, match=words):
            call(**(given() | changed))
