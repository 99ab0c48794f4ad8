"""`step` says what is wrong with what it is given, and not from the depth of a product."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.driver import step
from jaxkv.rotary import NoPosition

SPEC = jaxkv.Spec(kv_heads=2, head_dim=8, scale=1.0, encoding=NoPosition())
POLICY = jaxkv.policy("window:window=4")


class Other(tuple):
    """The state of another policy."""


def given(rows=1, tokens=3, heads=4):
    """Arguments that agree."""
    q, kv = jnp.ones((rows, tokens, heads, 8)), jnp.ones((rows, tokens, 2, 8))
    positions = jnp.zeros((rows, tokens), jnp.uint32)
    state = POLICY.init(SPEC, rows, jax.random.key(0))
    return {"policy": POLICY, "spec": SPEC, "state": state, "q": q, "k": kv, "v": kv,
            "positions": positions, "valid": jnp.ones((rows, tokens), bool)}  # fmt: skip


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
    "another state": ({"state": Other()}, "a Slots, got a Other; begin with policy.init"),
    "other rows": ({"state": POLICY.init(SPEC, 2, jax.random.key(0))}, r"rows as q: 1, got \[2\]"),
}


def test_what_agrees_is_taken():
    out, _ = step(**given())
    assert out.shape == (1, 3, 4, 8)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_is_refused(name):
    changed, words = BAD[name]
    # Underneath the checks of types that the tests put around every function of jaxkv.
    with pytest.raises(jaxkv.UserError, match=words):
        inspect.unwrap(step)(**(given() | changed))
