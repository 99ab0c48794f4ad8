"""Tuning of K and L: measured errors are those of the policy, and the recommendation is optimal."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.evals.balancekv import single_layer
from jaxkv.evals.magicpig import heads, tune_lsh
from jaxkv.evals.magicpig.tune_lsh import SINKS, WINDOW
from jaxkv.policies import MagicPIG
from jaxkv.policies.magicpig.lsh import Hashing
from jaxkv.rotary import rotary

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
LENGTH = 260


@pytest.fixture(scope="module")
def layer():
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 1, LENGTH, 4, 8)).astype(np.float32)
    return heads.CapturedLayer(*map(jnp.asarray, (q, k[:, :, :2], v[:, :, :2] + 1)))


def test_the_largest_l_equals_the_policy(layer):
    """An equal seed gives equal planes, so equal keys and equal attention."""
    how = Hashing(5, 12)
    first, last = tune_lsh.by_tables(SPEC, layer, how, (4, 12), 3)
    chosen = MagicPIG(5, 12, SINKS, WINDOW, tail=128)
    expected = single_layer.attend(SPEC, *(np.asarray(a[0]) for a in layer), chosen, 3)
    np.testing.assert_allclose(last.out[0], expected, atol=1e-4)
    assert (first.share < last.share).all()


def test_agreements_grow_with_the_number_of_tables(layer):
    """In the expected number: about half of them with K=1 and keys at any angle."""
    asked = heads.last_queries(SPEC, layer, SINKS, WINDOW, 0)
    keys, cosines = heads.centred(SPEC, layer, SINKS, WINDOW)
    how = Hashing(1, 200)
    first, last = tune_lsh.agreements(asked, keys, how, (50, 200))
    assert (first <= last).all() and last.max() <= 200
    chance = 1 - np.arccos(np.clip(cosines, -1, 1)) / np.pi
    assert np.abs(np.asarray(last) / 200 - chance).mean() < 0.04


def points(*rows):
    return [
        {"K": K, "L": L, "share": share, "table_bytes": L, "of_cache": L / 10,
         "error": {"mean": error, "standard_error": 0.01}}
        for K, L, share, error in rows
    ]  # fmt: skip


SOME = points((4, 10, 0.5, 0.05), (4, 20, 0.6, 0.06), (6, 10, 0.1, 0.3), (6, 40, 0.2, 0.07))


def test_no_point_of_the_frontier_is_dominated():
    random = np.random.default_rng(0)
    many = points(*((4, i, *random.uniform(size=2)) for i in range(200)))
    for candidates in (many, SOME):
        best = tune_lsh.frontier(candidates)
        for best_point in best:
            assert not any(
                (p["share"] <= best_point["share"] and p["error"]["mean"] < best_point["error"])
                or (p["share"] < best_point["share"] and p["error"]["mean"] <= best_point["error"])
                for p in candidates
            )  # fmt: skip
        errors = [point["error"] for point in best]
        assert errors == sorted(errors, reverse=True)
    assert [(p["K"], p["L"]) for p in best] == [(6, 10), (6, 40), (4, 10)]


def test_the_smallest_tables_below_a_target_are_recommended():
    assert tune_lsh.smallest_tables(SOME, 0.1)["L"] == 10
    assert tune_lsh.smallest_tables(SOME, 0.1)["K"] == 4
    assert (
        tune_lsh.smallest_tables(SOME, 0.32)["share"] == 0.1
    )  # of equal tables, the smallest share
    assert tune_lsh.smallest_tables(SOME, 0.069) is None  # within two standard errors
