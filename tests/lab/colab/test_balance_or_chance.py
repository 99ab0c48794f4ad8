"""Computations of notebook 03: signed sums, attention errors and synthetic prompts."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.colab import balance_or_chance as compression
from jaxkv.contract import Spec
from jaxkv.evals.balancekv.single_layer import QUERIES
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import NoPosition

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=NoPosition(), group=1)


def drawn(tokens, seed=0):
    q, k, v = np.random.default_rng(seed).normal(size=(3, tokens, 2, 8)).astype(np.float32)
    return q, k, v


def test_lengths_are_norms_of_the_signed_sums():
    """The walk's vectors written out as the series of the exponential kernel, by degree."""
    random = np.random.default_rng(0)
    points, signs = random.normal(size=(7, 2)) / 2, random.choice([-1, 1], (3, 7))
    x, y = (points - points.mean(axis=0)).T
    terms = [
        np.sqrt(compression.PLANE.key_scale ** (i + j)) * x**i * y**j
        / math.sqrt(math.factorial(i) * math.factorial(j))
        for i in range(16) for j in range(16)
    ]  # fmt: skip
    vectors = np.stack(terms, axis=1)
    sums = np.cumsum(signs[:, :, None] * vectors, axis=1)
    expected = np.linalg.norm(sums, axis=2) / np.sqrt((vectors**2).sum(axis=1).mean())
    np.testing.assert_allclose(compression.signed_lengths(points, signs), expected, rtol=1e-6)


@pytest.mark.slow
def test_balanced_signs_leave_a_shorter_sum_than_random_ones():
    halved = compression.halve_points(draws=20)
    assert halved.points.shape == (sum(compression.SIZES), 2)
    assert (np.bincount(halved.group) == compression.SIZES).all()
    assert all(set(signs.tolist()) == {-1, 1} for signs in halved.signs.values())
    chance, balanced = (np.median(lengths[:, -1]) for lengths in halved.lengths.values())
    assert 1.5 * balanced < chance


@pytest.mark.parametrize("name", ["balance, walk", *compression.COMPARED])
def test_every_method_keeps_the_same_number_of_tokens(name):
    chosen = parse_policy(
        compression.policy_string(name, rounds=2, between=256, sinks=8, window=40)
    )
    if name == "snapkv":
        assert chosen.capacity == 8 + 40 + 64
    else:
        assert (chosen.sinks, chosen.window, chosen.rounds) == (8, 40, 2)


def test_a_weighted_sample_of_equal_tokens_is_exact_and_an_unweighted_one_is_not():
    q, k, v = drawn(64 + 32 + QUERIES)
    k[:64], v[:64] = k[0], v[0]
    names = ("uniform, weighted", "uniform")
    errors = compression.compare(SPEC, q, k, v, (0, 32), 1, [0, 1], names)
    assert max(errors["uniform, weighted"]) < 1e-5
    assert min(errors["uniform"]) > 0.01 and len(errors["uniform"]) == 2


def test_attention_on_the_heaviest_keys_equals_numpy():
    q, k, v = drawn(100 + QUERIES)
    between = slice(10, 60)
    assert compression.attention_on_heaviest(SPEC, 0 * q, k, v, between, 0.1) == pytest.approx(0.1)
    logits = np.einsum("tnh,snh->nts", q[-QUERIES:], k[between]).astype(np.float64) * SPEC.scale
    weights = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    expected = np.sort(weights, axis=2)[..., -5:].sum(axis=2).mean()
    assert compression.attention_on_heaviest(SPEC, q, k, v, between, 0.1) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("name", compression.SYNTHETIC)
def test_synthetic_prompts_have_their_described_properties(name):
    q, k, v = compression.synthetic_prompt(name, seed=0)
    again = compression.synthetic_prompt(name, seed=0)
    assert all((a == b).all() for a, b in zip((q, k, v), again, strict=True))
    rest = k[: compression.BETWEEN].std()
    assert rest == pytest.approx(1, abs=0.1) and v.std() == pytest.approx(1, abs=0.1)
    beside = np.mean([(a[1:] * a[:-1]).mean() for a in (k, v)])
    assert beside == pytest.approx(0.95 if name == "neighbours alike" else 0, abs=0.07)
    nearest = np.sort(v[:, 0] @ v[:, 0].T, axis=1)[:, -2].mean() / compression.DIM
    alike = name in ("neighbours alike", "kinds, mixed")
    assert nearest > 0.85 if alike else nearest < 0.6
    top = compression.attention_on_heaviest(
        compression.SPEC, q, k, v, slice(compression.BETWEEN), 0.01
    )
    assert top > 0.9 if name == "a few heavy keys" else top < 0.12


def test_the_table_shows_the_errors_of_balance_over_others():
    errors_by_policy = [[1.0, 2.0, 3.0], [8.0], [4.0], [2.0], [1.0]]
    errors = dict(zip(compression.COMPARED, errors_by_policy, strict=True))
    *_, line = compression.error_table(
        {5: {"errors": {2: errors}, "tenth": 0.25, "sink": 0.5}}, rounds=2
    ).splitlines()
    assert line.split() == ["5", "50%", "25%", "0.25", "0.50", "1.00", "2.00"]


def test_errors_of_a_layer_are_means_over_its_stretches():
    q, k, v = (np.stack([drawn(320, seed)[i] for seed in (0, 1)]) for i in range(3))
    layer = CapturedLayer(*map(jnp.asarray, (q, k, v)))
    means = compression.measure_layers(SPEC, {4: layer}, [1], 2, ["uniform"])[4]
    seeds = (range(2), range(2, 4))
    errors = [
        compression.compare(SPEC, q[i], k[i], v[i], (64, 64), 1, seeds[i], ["uniform"])["uniform"]
        for i in (0, 1)
    ]
    np.testing.assert_allclose(means["errors"][1]["uniform"], np.mean(errors, axis=0), rtol=1e-6)
    assert means["errors"][1]["ends alone"][0] > 0
    assert means["sink"] == pytest.approx(1 / 290, rel=0.5) and 0.1 < means["tenth"] < 0.5
