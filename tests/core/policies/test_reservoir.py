"""The distribution of the sample: the uniform scheme is uniform, the published one is not."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.policies import Reservoir
from jaxkv.rotary import NoPosition

SPEC = Spec(kv_heads=1, head_dim=1, scale=1.0, encoding=NoPosition())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(policy, tokens, seeds):
    """The sampled positions [seeds,S] after `tokens` tokens, one sequence per seed."""
    zeros, valid = jnp.zeros((seeds, 1, 1, 1)), jnp.ones((seeds, 1), bool)

    def update_token(state, position):
        positions = jnp.full((seeds, 1), position, jnp.uint32)
        return policy.update(SPEC, state, Chunk(zeros, zeros, zeros, positions, valid))[1], None

    state = policy.init(SPEC, seeds, jax.random.key(0))
    state, _ = jax.lax.scan(update_token, state, jnp.arange(tokens))
    return state.sample.positions[:, 0]


def sampled(scheme, sample, n, seeds):
    """The tokens of 0 .. n-1 in the sample after n tokens left a window of one."""
    return np.asarray(draw(Reservoir(0, 1, sample, scheme), n + 1, seeds))


SCHEMES = ("uniform", "geometric")


def chi_square(chosen, n):
    """Chi-square of inclusion counts with n - 1 degrees of freedom. No token is sampled twice."""
    seeds, k = chosen.shape
    counts, p = np.bincount(chosen.ravel(), minlength=n), k / n
    return (n - 1) / n * ((counts - seeds * p) ** 2).sum() / (seeds * p * (1 - p))


def test_uniform_is_accepted_and_the_listing_is_not(record_property):
    """Threshold: chi-square of 119.9 with 63 degrees of freedom, where p is 1e-4."""
    setting = {"tokens": 64, "sample": 8, "seeds": 4000}
    statistics = {name: float(chi_square(sampled(name, 8, 64, 4000), 64)) for name in SCHEMES}
    for name, value in (setting | statistics).items():
        record_property(name, value)
    assert statistics["uniform"] < 119.9 and statistics["geometric"] > 10_000


def test_figure_4():
    """Of 3, 4 and 5 evicted tokens, each is sampled with probability 2/3, 1/2 and 2/5."""
    for num_tokens, share in ((3, 2 / 3), (4, 1 / 2), (5, 2 / 5)):
        chosen = sampled("uniform", 2, num_tokens, 8000)
        of_each = np.bincount(chosen.ravel(), minlength=num_tokens) / len(chosen)
        assert np.abs(of_each - share).max() < 4 * np.sqrt(share * (1 - share) / 8000)


SUBSETS = {  # each sample of two out of five, and its probability
    "uniform": dict.fromkeys(itertools.combinations(range(5), 2), 1 / 10),
    "geometric": {
        **dict.fromkeys([(0, 1), (0, 2), (1, 2)], 1 / 27),
        **dict.fromkeys([(0, 3), (1, 3), (2, 3)], 2 / 27),
        **dict.fromkeys([(0, 4), (1, 4), (2, 4)], 4 / 27),
        (3, 4): 2 / 9,
    },
}


@pytest.mark.parametrize("scheme", SUBSETS)
def test_the_probability_of_every_sample_of_two_out_of_five(scheme):
    seeds = 20_000
    counts = Counter(tuple(sorted(row)) for row in sampled(scheme, 2, 5, seeds).tolist())
    assert set(counts) == set(SUBSETS[scheme]) and abs(sum(SUBSETS[scheme].values()) - 1) < 1e-12
    for subset, p in SUBSETS[scheme].items():
        assert abs(counts[subset] / seeds - p) < 4 * np.sqrt(p * (1 - p) / seeds), subset
