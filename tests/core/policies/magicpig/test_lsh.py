"""The probability that a key is sampled: against scipy, the paper's tables, and random planes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.evals.magicpig import inclusion
from jaxkv.policies.magicpig import lsh
from jaxkv.policies.magicpig.lsh import Hashing

COSINES = np.concatenate(
    [np.linspace(-1, 1, 20001), -1 + np.logspace(-7, -1, 501), 1 - np.logspace(-7, -1, 501)]
).astype(np.float32)[1:]
TABLES = [(10, 150), (8, 75), (9, 120), (11, 300), (4, 4), (1, 2), (16, 1000)]


@pytest.mark.parametrize("min_tables", [1, 2])
@pytest.mark.parametrize(("bits", "tables"), TABLES)
def test_log_u_is_the_incomplete_beta_for_every_cosine(bits, tables, min_tables):
    actual = jax.jit(lambda c: lsh.log_inclusion(c, Hashing(bits, tables, min_tables)))(COSINES)
    expected = inclusion.log_u(COSINES.astype(np.float64), bits, tables, min_tables)
    assert np.abs(np.asarray(actual) - expected).max() < 5e-5


def test_log_inclusion_at_the_ends_of_the_range():
    ends = np.asarray(lsh.log_inclusion(jnp.asarray([-1.0, 1.0, -1.5, 1.5]), Hashing()))
    assert np.isfinite(ends).all() and ends[0] < -1000 and abs(ends[1]) < 1e-6
    np.testing.assert_array_equal(ends[:2], ends[2:])  # rounding may leave [-1, 1]


def test_the_floor_of_the_published_code_caps_the_weight():
    weight = np.asarray(Hashing(10, 150, u_floor=1e-4)(jnp.asarray([-0.9, 0.0, 0.9, 1.0])))
    u = np.exp(inclusion.log_u(np.array([-0.9, 0.0, 0.9, 1.0]), 10, 150))
    np.testing.assert_allclose(weight, -np.log(u + 1e-4), atol=1e-5)
    assert weight[0] < np.log(1e4) + 1e-5


def test_planes_are_normal_and_differ_by_kv_head():
    seeds = jax.random.bits(jax.random.key(0), (2, 3, 2), jnp.uint32)
    planes = np.asarray(lsh.planes(seeds, 64, Hashing(8, 40)))
    assert planes.shape == (2, 3, 64, 320)
    count = planes[0, 0].size
    for plane in planes.reshape(6, -1):
        assert abs(plane.mean()) < 4 / np.sqrt(count)
        assert abs(plane.var() - 1) < 4 * np.sqrt(2 / count)
        assert abs((plane**4).mean() - 3) < 4 * np.sqrt(96 / count)
    between = np.corrcoef(planes.reshape(6, -1)) - np.eye(6)
    assert np.abs(between).max() < 4 / np.sqrt(count)


def test_codes_are_the_sides_of_the_planes():
    rng = np.random.default_rng(0)
    x, planes = rng.normal(size=(2, 5, 16)), rng.normal(size=(2, 16, 12))
    how = Hashing(4, 3)
    codes = np.asarray(lsh.codes(*(jnp.asarray(a, jnp.float32) for a in (x, planes)), how))
    sides = (np.einsum("xsh,xhf->xsf", x, planes) > 0).reshape(2, 5, 3, 4)
    np.testing.assert_array_equal(codes, (sides @ [1, 2, 4, 8]).transpose(0, 2, 1))


def test_keys_are_found_with_probability_u():
    """d = 64, K = 8, L = 40, over random planes: within 4 standard errors at every cosine."""
    how, draws, batch = Hashing(8, 40), 4000, 50
    cosines = np.array([0.0, 0.3, 0.5, 0.7, 0.85, 0.95])
    keys = np.zeros((len(cosines) + 1, 64), np.float32)
    keys[:-1, 0], keys[:-1, 1], keys[-1, 0] = cosines, np.sqrt(1 - cosines**2), 1  # the query last

    @jax.jit
    def found_keys(seeds):
        planes = lsh.planes(seeds, 64, how)[:, 0]
        codes = lsh.codes(jnp.broadcast_to(keys, (batch, *keys.shape)), planes, how)
        agree = jnp.sum(codes[:, :, :-1] == codes[:, :, -1:], axis=1)
        return jnp.sum(agree >= 2, axis=0)

    seeds = jax.random.bits(jax.random.key(3), (draws // batch, batch, 1, 2), jnp.uint32)
    share = sum(np.asarray(found_keys(some_seeds)) for some_seeds in seeds) / draws
    u = np.exp(np.asarray(lsh.log_inclusion(jnp.asarray(cosines, jnp.float32), how)))
    assert (np.abs(share - u) <= 4 * np.sqrt(u * (1 - u) / draws) + 1e-6).all()
    assert (u > 10 / draws).sum() >= 4, "the case must have keys that are found"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 0}, r"K must be from 1 to 16, got 0; try K=10"),
        ({"bits": 17}, r"K must be from 1 to 16, got 17"),
        ({"tables": 1}, r"L must be from 2 to 4096, got 1; try L=150"),
        ({"min_tables": 3}, r"min_tables must be 1 or 2, got 3"),
        ({"u_floor": -1e-4}, r"u_floor must be from 0 to less than 1, got -0.0001"),
        ({"u_floor": float("nan")}, r"u_floor must be from 0 to less than 1, got nan"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Hashing(**settings)
