"""`step` checks its arguments and raises one-line errors."""

import contextlib
import inspect
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.cache import ring
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.policies import Window
from jaxkv.rotary import Alibi, NoPosition, rotary
from jaxkv.state.sharding import mesh_of, sharded_step

SPEC = jaxkv.Spec(kv_heads=2, head_dim=8, scale=1.0, encoding=NoPosition())
POLICY = jaxkv.policy("window:window=4")


class Other(tuple):
    """The state of another policy."""


@dataclass(frozen=True)
class WithoutBase:
    """A policy with `update` that does not subclass jaxkv.Policy."""

    leaves = ring.LEAVES

    def update(self, spec, state, chunk):
        return ring.update(spec, state, chunk, ring.RingSettings(window=4))


def arguments(batch=1, tokens=3, heads=4):
    """Valid arguments."""
    q, kv = jnp.ones((batch, tokens, heads, 8)), jnp.ones((batch, tokens, 2, 8))
    positions = jnp.zeros((batch, tokens), jnp.uint32)
    state = POLICY.init(SPEC, batch, jax.random.key(0))
    return {"policy": POLICY, "spec": SPEC, "state": state, "q": q, "k": kv, "v": kv,
            "positions": positions, "valid": jnp.ones((batch, tokens), bool)}  # fmt: skip


# A case for each check.
BAD = {
    "a policy as text": ({"policy": "window"}, r"a policy is a value .* got 'window'"),
    "a policy without the base class": (
        {"policy": WithoutBase()},
        r"a frozen dataclass that subclasses jaxkv.Policy, got WithoutBase\(\)",
    ),
    "heads that do not divide": ({"q": jnp.ones((1, 3, 3, 8))}, r"multiple .*kv_heads=2.*3, 3, 8"),
    "another group": (
        {"spec": replace(SPEC, group=4)},
        r"group must be N/K=2 beside q .*, got 4; give Spec\(group=2\)",
    ),
    "no tokens": ({"q": jnp.ones((1, 0, 4, 8))}, r"at least 1, got \(1, 0, 4, 8\); give"),
    "another head dim": (
        {"q": jnp.ones((1, 3, 4, 6))},
        r"q must have .* head_dim=8 .*, got \(1, 3, 4, 6\); give Spec\(head_dim=6\)",
    ),
    "other kv heads": ({"v": jnp.ones((1, 3, 4, 8))}, r"v must be \[B,T,K,H\] = \(1, 3, 2, 8\)"),
    "whole numbers": ({"q": jnp.ones((1, 3, 4, 8), int)}, "q must be floating point, got int32"),
    "one position": (
        {"positions": jnp.zeros((1, 1), jnp.uint32)},
        r"positions must be \[B,T\] = \(1, 3\)",
    ),
    "positions as floats": (
        {"positions": jnp.zeros((1, 3))},
        "positions must be uint32, got float32",
    ),
    "positions in a list": ({"positions": [[0, 1, 2]]}, "positions must be an array, got a list"),
    "no valid": ({"valid": None}, "valid must be an array, got a NoneType; convert it"),
    "valid as floats": ({"valid": jnp.ones((1, 3))}, "valid must be bool, got float32"),
    "another state": ({"state": Other()}, "a Ring, got a Other; begin with policy.init"),
    "another size": (
        {"state": Window(6).init(SPEC, 1, jax.random.key(0))},
        r"Window\(.*has an array \[B K S H\] of \(1, 2, 4, 8\), got \(1, 2, 6, 8\); begin with",
    ),
    "another batch": (
        {"state": POLICY.init(SPEC, 2, jax.random.key(0))},
        "B=1, got B=2; begin with",
    ),
    "sink logits in a list": (
        {"sink_logits": [0.0] * 4},
        "sink_logits must be an array, got a list",
    ),
    "one sink logit per kv head": (
        {"sink_logits": jnp.zeros(2)},
        r"sink_logits must be \[N\] = \(4,\)",
    ),
}


def test_a_sink_logit_enters_once():
    """As the logit of one more key, whose value is zero. The logits of the equal keys are 8."""
    out, _ = jax.jit(partial(step, POLICY, SPEC))(
        *[x for name, x in arguments().items() if name not in ("policy", "spec")],
        jnp.full(4, 8.0),
    )
    expected = jnp.broadcast_to(jnp.asarray([1 / 2, 2 / 3, 3 / 4])[:, None, None], (1, 3, 4, 8))
    assert jnp.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    changed, words = BAD[name]
    # Unwrapped, because in tests the shape checks around every function would raise first.
    on_a_mesh = partial(inspect.unwrap(sharded_step), mesh_of("model=2"))
    for call in (inspect.unwrap(step), on_a_mesh):
        with pytest.raises(jaxkv.UserError, match=words) as caught:
            call(**(arguments() | changed))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field, value, message", [
    ("kv_heads", 0, "kv_heads must be at least 1, got 0"),
    ("head_dim", -1, "head_dim must be at least 1, got -1"),
    ("group", 0, "group must be at least 1, got 0"),
    ("scale", float("nan"), "scale must be a finite Python number above 0, got nan; try head_dim"),
    ("softcap", -1.0, "softcap must be a finite Python number above 0, got -1.0; give None"),
    ("dtype", "float33", "dtype must be one of float32, bfloat16, float16, got 'float33'"),
])  # fmt: skip
def test_a_bad_spec_is_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        replace(SPEC, **{field: value})


GROUPED = replace(SPEC, group=2)


@pytest.mark.parametrize("batch", [0, -1, 1.5])
@pytest.mark.parametrize("name", jaxkv.POLICIES)
def test_a_state_has_one_sequence_or_more(name, batch, pytestconfig):
    if batch == 1.5 and pytestconfig.option.typecheck:
        pytest.skip("the check of types refuses it first")
    with pytest.raises(UserError, match=f"batch must be .*, got {batch}; use 1 or more"):
        jaxkv.policy(name).init(GROUPED, batch, jax.random.key(0))


@pytest.mark.parametrize("name", jaxkv.POLICIES)
def test_draws_need_a_key_of_jax(name, pytestconfig):
    policy = jaxkv.policy(name)
    names = map(jax.tree_util.keystr, dict(jax.tree_util.tree_leaves_with_path(policy.leaves)))
    draws = any(name.endswith("rng") for name in names)
    refused = pytest.raises(UserError, match=r"rng must be .*; give jax.random.key")
    # The check of types refuses what is no array first.
    for rng in (jnp.zeros(2), *(() if pytestconfig.option.typecheck else (0, None))):
        with refused if draws else contextlib.nullcontext():
            policy.init(GROUPED, 1, rng)
    policy.init(GROUPED, 1, jax.random.PRNGKey(0))  # an older form of a key


SIZES = {
    "layers": lambda size: jaxkv.by_layer("full", size),
    "batch": lambda size: jaxkv.state_bytes([POLICY], SPEC, size),
    "heads": Alibi.of,
    "head_dim": lambda size: rotary(size, 1e4),
}


@pytest.mark.parametrize("size", [0, -2])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_below_one_is_refused(name, size):
    with pytest.raises(UserError, match=f"{name} must be at least [12], got {size}; use"):
        SIZES[name](size)


@pytest.mark.parametrize("name", jaxkv.POLICIES)
def test_tokens_below_zero_are_refused(name):
    policy = jaxkv.policy(name)
    asks = [lambda: jaxkv.state_bytes([policy], GROUPED, 1, -1)]
    if policy.grows:
        state = policy.init(GROUPED, 1, jax.random.key(0))
        asks += [lambda: policy.reserve(GROUPED, state, -1)]
        asks += [lambda: policy.bytes_per_sequence(GROUPED, -1)]
    for ask in asks:
        with pytest.raises(UserError, match="tokens must be at least 0, got -1"):
            ask()
