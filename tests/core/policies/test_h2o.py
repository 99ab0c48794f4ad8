"""What a key that is not finite does to a cache of heavy hitters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.policies import H2O
from jaxkv.rotary import rotary
from tests.core.tokens import chunk, run

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
LENGTH = 40  # tokens of a sequence


def read(policy, tokens):
    """The outputs [T,B,N,H], and the states after each token."""
    outs, states = run(policy, SPEC, tokens, 1)
    return outs.swapaxes(0, 1), jax.tree.map(lambda *leaves: np.stack(leaves), *states)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at, leaves", [(0, 7), (9, None)])
def test_a_key_that_is_not_finite_stays_in_its_sequence_and_kv_head(rng, at, leaves, bad):
    """The output is NaN while the key is cached, and in no other sequence or KV head.

    at: of the bad key. leaves: the token that evicts it. While it is cached, all scores of its KV
    head are NaN, and each new token evicts the first slot that has none of the newest tokens. These
    are the first `window` slots in turn. So a bad key in another slot stays.
    """
    policy, tokens = H2O(heavy=4, window=3), chunk(SPEC, LENGTH, rng=rng, batch=2)
    plain, before = read(policy, tokens)
    outs, after = read(policy, tokens._replace(k=tokens.k.at[0, at, 0].set(bad)))
    # The other sequence, and the other KV head with its two query heads.
    for unaffected in (np.s_[:, 1], np.s_[:, 0, 2:]):
        np.testing.assert_array_equal(outs[unaffected], plain[unaffected])
    for actual, expected in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(actual[:, 1], expected[:, 1])
        if actual.ndim > 2:  # all but the count
            np.testing.assert_array_equal(actual[:, 0, 1:], expected[:, 0, 1:])
    tokens = np.arange(LENGTH)
    cached = (tokens >= at) & (tokens < (leaves or LENGTH))
    filled = tokens[:, None] >= np.arange(7)
    kept = (np.asarray(after.tokens.positions[:, 0, 0]) == at) & filled
    np.testing.assert_array_equal(kept.any(axis=1), cached)
    is_nan = np.isnan(outs[:, 0, :2]).all(axis=-1)
    np.testing.assert_array_equal(is_nan, np.stack([cached, cached], axis=1))
    assert np.isfinite(outs[~cached, 0]).all()
    lost = np.isnan(after.score[:, 0, 0])
    assert lost[cached].all() and not lost[:at].any() and lost[-1].any() == (leaves is None)
