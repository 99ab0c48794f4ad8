"""Full attention grows to its maximum, and reports every token without a slot."""

import functools

import jax
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.policies import Full
from jaxkv.rotary import rotary
from jaxkv.state import batch
from tests.core.tokens import chunk

SPEC = Spec(kv_heads=1, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0))
POLICY = Full(max=12, start=4)

jitted_step = jax.jit(functools.partial(step, POLICY, SPEC))


def feed(state, start, length):
    return jitted_step(state, *chunk(SPEC, length, start))


def test_the_cache_doubles_up_to_its_maximum():
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    sizes = []
    for tokens in range(1, 13):
        state = POLICY.reserve(SPEC, state, tokens)
        sizes.append(state.positions.shape[1])
    assert sizes == [4] * 4 + [8] * 4 + [12] * 4
    with pytest.raises(
        UserError,
        match="at most 12 tokens and 13 are needed; raise max where the policy has one, or",
    ):
        POLICY.reserve(SPEC, state, 13)


def test_growth_preserves_the_cached_tokens():
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    _, state = feed(state, 0, 3)
    grown = POLICY.reserve(SPEC, state, 9)
    np.testing.assert_array_equal(grown.k[:, :, :4], state.k)
    assert batch.nbytes(grown) > batch.nbytes(state)
    actual, expected = (feed(s, 3, 1)[0] for s in (state, grown))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_overfull_sequences_output_nan_from_then_on(size):
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    out, state = feed(state, 0, 4)
    assert np.isfinite(out).all()
    for start in range(4, 40, size):
        out, state = feed(state, start, size)
        assert np.isnan(out).all()
    # Later growth does not restore the lost tokens.
    out, _ = feed(POLICY.reserve(SPEC, state, 12), 40, size)
    assert np.isnan(out).all()


def test_tokens_without_slots_are_refused_outside_compiled_calls():
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    with pytest.raises(UserError, match=r"a sequence has 4 slots and 5 are needed; .*reserve"):
        step(POLICY, SPEC, state, *chunk(SPEC, 5))
    _, state = feed(POLICY.reserve(SPEC, state, 6), 0, 8)
    with pytest.raises(UserError, match="a sequence has 8 slots and 9 are needed"):
        step(POLICY, SPEC, state, *chunk(SPEC, 1, 8))


def test_a_state_that_is_closed_over_compiles():
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    out = jax.jit(lambda tokens: step(POLICY, SPEC, state, *tokens)[0])(chunk(SPEC, 3))
    assert np.isfinite(out).all()


def test_tokens_lost_in_a_compiled_call_are_reported_by_the_next_uncompiled_call():
    state = POLICY.init(SPEC, 1, jax.random.key(0))
    _, state = feed(state, 0, 5)
    for valid in (True, False):
        with pytest.raises(UserError, match="they are lost; begin again"):
            step(POLICY, SPEC, state, *chunk(SPEC, 1, 5, valid=np.full((1, 1), valid)))
