"""Right answers, intervals, the gate and budgets."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.contract import Chunk
from jaxkv.evals.tasks import budgets, score
from jaxkv.rotary import rotary


def test_a_match_is_the_share_of_answers_in_any_case():
    assert score.match(" 48213. It is", ["48213"]) == 1
    assert score.match("abc, DEF", ["ABC", "def", "ghi", "jkl"]) == 0.5
    assert score.match("", ["48213"]) == 0


@pytest.mark.parametrize(
    "share, count, low, high",  # Brown, Cai and DasGupta 2001; Agresti and Coull 1998
    [(1.0, 10, 0.722, 1.0), (0.5, 10, 0.237, 0.763), (0.0, 20, 0.0, 0.161)],
)
def test_intervals_are_those_of_wilson(share, count, low, high):
    assert score.wilson(share, count) == pytest.approx((low, high), abs=1e-3)


LENGTH = 256
SPEC = jaxkv.Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 1e4), group=1)
STORED = ("window", "streaming", "h2o", "reservoir", "uniform", "balance", "snapkv",
          "expected-attention", "keydiff")  # fmt: skip


@pytest.fixture(scope="module")
def chunk():
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(1, LENGTH, 2, 8)), jnp.float32) for _ in "qkv")
    positions = jnp.arange(LENGTH, dtype=jnp.uint32)[None]
    return Chunk(q, k, v, positions, jnp.ones((1, LENGTH), bool))


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("name", STORED)
def test_policies_cache_their_budget(chunk, name, ratio):
    policy = jaxkv.policy(budgets.settings(LENGTH, ratio, LENGTH)[name])
    state = policy.init(SPEC, 1, jax.random.key(0))
    _, state = jax.jit(policy.update, static_argnums=0)(SPEC, state, chunk)
    state = policy.finish_prefill(SPEC, state)
    count = np.sum(np.asarray(policy.cached(SPEC, state).log_weight) > -np.inf, axis=2)
    # Halving works on groups of 2^rounds tokens; the newest that make no group stay.
    slack = 1 << getattr(policy, "rounds", 1)
    assert np.abs(count - budgets.budget_of(LENGTH, ratio)).max() <= slack


@pytest.mark.parametrize("ratio", budgets.RATIOS)
def test_evicting_policies_have_equal_bytes_and_sparse_ones_equal_shares(ratio):
    length, spec = 1024, replace(SPEC, head_dim=64)
    policies = {n: jaxkv.policy(s) for n, s in budgets.settings(length, ratio, length).items()}
    evicting = ("window", "streaming", "h2o", "reservoir", "stratified", "balance-stream")
    sizes = [policies[name].bytes_per_sequence(spec) for name in evicting]
    assert max(sizes) < 1.05 * min(sizes)
    for name in ("topk", "quest", "oracle"):
        ends = policies[name].sinks + policies[name].window
        selected = policies[name].share * (length - ends)
        assert ends + selected == pytest.approx(budgets.budget_of(length, ratio), abs=1)
    vattention = policies["vattention"]
    drawn = vattention.top + vattention.base * (1 - vattention.top)
    assert drawn == pytest.approx(policies["topk"].share, rel=0.01)
