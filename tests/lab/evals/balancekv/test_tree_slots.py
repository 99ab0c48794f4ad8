"""Trees of equal slots: slots in use, cases, holes in cache-relative positions, a small run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.evals.balancekv import tree_slots
from jaxkv.evals.balancekv.contiguous import ContiguousStream
from jaxkv.evals.lib.state_sizes import sequence_bytes
from jaxkv.evals.reservoir.stream_losses import mean_cached
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import rotary


@pytest.mark.parametrize("levels, block", [(1, 16), (2, 8), (4, 4)])
def test_the_slots_in_use_are_those_of_a_running_cache(levels, block):
    size = TreeSize(levels, block)
    policy = parse_policy(tree_slots.tree(size, 64))
    num_sampled = mean_cached(policy, tokens=4_096, chunk=1) - policy.sinks - policy.window
    assert tree_slots.used(size) == pytest.approx(num_sampled, abs=0.2)
    assert tree_slots.about(size)["share"] == pytest.approx(
        (levels + 2) / (2 * (levels + 1)), abs=0.05
    )


def test_trees_share_equal_slots_or_equal_tokens(llm):
    cases = tree_slots.cases(llm)
    streaming = sequence_bytes(llm, cases["streaming"].policy)
    for size in tree_slots.TREES:
        policy = parse_policy(cases[tree_slots.named(size)].policy)
        assert policy.sinks + policy.window + size.slots == tree_slots.SLOTS
        assert sequence_bytes(llm, cases[tree_slots.named(size)].policy) <= streaming
    assert parse_policy("balance-stream") == parse_policy(cases["2 x 64"].policy)
    fewer = parse_policy(cases["streaming, equal tokens"].policy)
    for size in tree_slots.AT_EQUAL_TOKENS:
        policy = parse_policy(cases[f"{tree_slots.named(size)}, equal tokens"].policy)
        held = policy.sinks + policy.window + tree_slots.used(size)
        assert held == pytest.approx(fewer.sinks + fewer.window, abs=1)


def test_a_kv_head_misses_one_position_at_most():
    """A head waits for its token in (1 - 2^-r) / 2 of all steps on average."""
    size, heads = TreeSize(3, 8), 64
    seeds = jax.random.bits(jax.random.key(0), (1, heads, 2), jnp.uint32)
    missing = tree_slots.positions_without_token(size, tree_slots.doubling(size), seeds)
    assert missing.shape[0] == heads
    assert set(np.unique(missing)) == {0, 1}
    r = tree_slots.DOUBLINGS + 1
    assert missing.mean() == pytest.approx((1 - 2.0**-r) / 2, abs=0.02)
    early = jnp.arange(size.before, dtype=jnp.uint32)
    assert not tree_slots.positions_without_token(size, early, seeds).any()


def rotated(x, position):
    """x [H] rotated as pairs (i, i + H/2)."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


@pytest.mark.parametrize("levels", [1, 3])
def test_contiguous_positions_are_ranks_of_the_cached_tokens(levels, rng):
    """A plain-numpy attention at the ranks of each head's cached tokens agrees at every step."""
    spec, tokens = Spec(2, 4, 0.5, rotary(4, 100.0)), 120
    policy = ContiguousStream(1, 3, levels, 4)
    q, k, v = (jnp.asarray(rng.normal(size=(1, tokens, n, 4)), jnp.float32) for n in (4, 2, 2))

    @jax.jit
    def update(state, at):
        q1, k1, v1 = (jax.lax.dynamic_slice_in_dim(x, at, 1, 1) for x in (q, k, v))
        chunk = Chunk(q1, k1, v1, at[None, None].astype(jnp.uint32), jnp.ones((1, 1), bool))
        attended, state = policy.update(spec, state, chunk)
        return attended.out[0, 0], policy.cached(spec, state), state

    state = policy.init(spec, 1, jax.random.key(0))
    keys, values, queries = (np.asarray(x[0], np.float64) for x in (k, v, q))
    for at in range(tokens):
        out, cached, state = update(state, jnp.asarray(at))
        for head in range(4):
            filled = np.asarray(cached.log_weight[0, head // 2]) == 0
            cached_at = np.sort(np.asarray(cached.positions[0, head // 2])[filled])
            assert cached_at[-1] == at and len(set(cached_at)) == len(cached_at)
            ranks = np.arange(len(cached_at))
            logits = [
                0.5 * rotated(queries[at, head], ranks[-1]) @ rotated(keys[n, head // 2], rank)
                for n, rank in zip(cached_at, ranks, strict=True)
            ]
            weights = np.exp(logits - np.max(logits))
            expected = weights @ values[cached_at, head // 2] / weights.sum()
            np.testing.assert_allclose(out[head], expected, atol=2e-5)
