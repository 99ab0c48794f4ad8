"""Prompt compression: published budgets and weights, and bad settings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.policies import Balance, ExpectedAttention, PyramidKV, SnapKV
from jaxkv.policies.prompt_compression.balance import _as_published
from jaxkv.policy_spec import by_layer, format_policy, parse_policy
from jaxkv.rotary import NoPosition

SPEC = Spec(1, 8, 1.0, NoPosition(), group=1)


def test_pyramidkv_budgets_fall_from_layer_to_layer():
    """32 layers, with the published capacity 2048 and window 32: B = 2016, minimum 2016 // 20."""
    layers = by_layer("pyramidkv:capacity=2048", 32)
    budgets = [policy._snap.capacity - 32 for policy in layers]
    assert budgets[0] == 2 * 2016 - 100 and budgets[1] == budgets[0] - (3932 - 100) // 31
    assert budgets == sorted(budgets, reverse=True) and 100 <= budgets[-1] < 120
    assert 2016 <= np.mean(budgets) < 2016 + 16
    # The step is rounded down, which small budgets feel most.
    small = [policy._snap.capacity for policy in by_layer("pyramidkv:capacity=128", 30)]
    assert 128 < np.mean(small) <= 128 * 1.05
    assert len({type(policy) for policy in layers}) == 1 and layers[3].layer == 3


def test_one_pyramidkv_string_names_all_layers():
    layers = by_layer("pyramidkv:capacity=512", 4)
    assert format_policy(layers).startswith(
        "pyramidkv:capacity=512,window=32"
    ) and "layer" not in format_policy(layers)
    assert by_layer(format_policy(layers), 4) == layers
    with pytest.raises(UserError, match="pyramidkv has no field 'layer'"):
        parse_policy("pyramidkv:layer=2")


def test_the_half_that_the_published_code_keeps():
    """By hand: at the seventh token half of ten signs are +1. Each earlier -1 counts twice."""
    signs = jnp.asarray([[[1, 1, -1, 1, 1, -1, 1, -1, 1, -1, 0, 0]]], jnp.int32)
    chosen, times = _as_published(signs, jnp.asarray([10], jnp.int32))
    assert chosen[0, 0, :5].tolist() == [2, 5, 7, 8, 9]
    assert times[0, 0, :5].tolist() == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("text", ["uniform:sinks=1,window=2,start=16", "snapkv:capacity=8,window=2",
                                  "keydiff", "expected-attention", "topk",
                                  "magicpig:K=4,L=6"])  # fmt: skip
def test_prefill_ends_once(text):
    policy, spec = parse_policy(text), SPEC
    state = policy.finish_prefill(spec, policy.init(spec, 1, jax.random.key(0)))
    with pytest.raises(UserError, match="prefill is finished already; call finish_prefill once"):
        policy.finish_prefill(spec, state)


@pytest.mark.parametrize("size", [10, 200])  # shorter than each capacity, and longer
@pytest.mark.parametrize("text", ["uniform", "balance", "snapkv:capacity=64", "keydiff:capacity=64",
                                  "expected-attention:capacity=64"])  # fmt: skip
def test_tokens_after_a_prompt_need_a_reserve(text, size):
    """Also after a prompt that is not compressed; it is then attended to exactly."""
    policy, spec = parse_policy(f"{text}{',' if ':' in text else ':'}start={size + 54}"), SPEC
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, size + 1, 1, 8), np.float32)
    positions, valid = np.arange(size + 1, dtype=np.uint32)[None], np.ones((1, size + 1), bool)
    arrays = [jnp.asarray(array) for array in (q, k, v, positions, valid)]
    cut = lambda *ends: [array[:, slice(*ends)] for array in arrays]  # noqa: E731
    state = policy.init(spec, 1, jax.random.key(0))
    state = policy.finish_prefill(spec, step(policy, spec, state, *cut(size))[1])
    with pytest.raises(UserError, match="reserve must be called after finish_prefill, got a state"):
        step(policy, spec, state, *cut(size, None))
    out, _ = step(policy, spec, policy.reserve(spec, state, 1), *cut(size, None))
    weights = np.exp(k[0, :, 0] @ q[0, -1, 0])
    exact = weights @ v[0, :, 0] / weights.sum()
    assert np.allclose(out[0, 0, 0], exact, atol=1e-5) == (size == 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("balance:rounds=0", "rounds must be from 1 to 10"),
        ("balance:rounds=-1", "rounds must be from 1 to 10, got -1; try rounds=2"),
        ("balance:start=0", "got 32, 32 and 0; try .*start=512"),
        ("balance:block=1099511627776", "up to 1073741824"),
        ("balance:c=inf", "c must be 0 or more and finite, got inf"),
        ("balance:rounds=3,block=12", "a multiple of 2.rounds.*block=12 and rounds=3"),
        ("balance:weights=published", "weights=published belong to mode=walk"),
        ("balance:window=0", "window and start at least 1"),
        ("uniform:rounds=31", "rounds must be from 1 to 10, got 31"),
        ("snapkv:capacity=32", "capacity must be more than window and .* got 32 and 32"),
        ("snapkv:kernel=4", "kernel must be 1, 3, 5"),
        ("keydiff:capacity=0", "capacity must be from 1 and start from 1, .* got 0 and 512"),
        ("expected-attention:capacity=4", "capacity must be from 5 .* got 4 and 512"),
        ("expected-attention:future=0", "future at least 1, got 4, 0.0 and 0"),
        ("expected-attention:epsilon=inf", "epsilon must be 0 or more"),
        ("pyramidkv:beta=0", "beta must be at least 1"),
        ("h2o:heavy=0", "heavy and window must be at least 1"),
        ("balance-stream:block=24", "block must be 2, 4, 8, ..., got 24"),
        ("balance-stream:levels=0", "levels must be at least 1, got 0"),
        ("stratified:sample=100", "sample must be 2, 4, 8, ..., got 100"),
    ],
)
def test_bad_settings_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_policy(text)


def test_policies_that_store_queries_need_the_group():
    from jaxkv.contract import Spec
    from tests.core.laws.cases import NONE

    with pytest.raises(UserError, match=r"give Spec\(group=...\)"):
        SnapKV().init(Spec(2, 8, 1.0, NONE), 1, jax.random.key(0))
    with pytest.raises(UserError, match=r"give Spec\(group=...\)"):
        ExpectedAttention().init(Spec(2, 8, 1.0, NONE), 1, jax.random.key(0))
    assert Balance().min_prompt == 32 + 32 + 3 + 1 and PyramidKV().min_prompt == 1025
