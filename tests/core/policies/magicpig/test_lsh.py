"""The probability that a key is sampled, against scipy and random planes; and hash tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.magicpig import inclusion
from jaxkv.policies.magicpig import hash_tables, lsh
from jaxkv.policies.magicpig.hash_tables import Tables
from jaxkv.policies.magicpig.lsh import Hashing

COSINES = np.concatenate(
    [np.linspace(-1, 1, 20001), -1 + np.logspace(-7, -1, 501), 1 - np.logspace(-7, -1, 501)]
).astype(np.float32)[1:]
TABLES = [(10, 150), (8, 75), (9, 120), (11, 300), (4, 4), (1, 2), (16, 1000)]


@pytest.mark.parametrize(("bits", "tables"), TABLES)
def test_log_u_is_the_incomplete_beta_for_every_cosine(bits, tables):
    actual = jax.jit(lambda c: lsh.log_inclusion(c, Hashing(bits, tables)))(COSINES)
    expected = inclusion.log_u(COSINES.astype(np.float64), bits, tables)
    assert np.abs(np.asarray(actual) - expected).max() < 5e-5


def test_log_inclusion_at_the_ends_of_the_range():
    ends = np.asarray(lsh.log_inclusion(jnp.asarray([-1.0, 1.0, -1.5, 1.5]), Hashing()))
    assert np.isfinite(ends).all() and ends[0] < -1000 and abs(ends[1]) < 1e-6
    np.testing.assert_array_equal(ends[:2], ends[2:])  # rounding may leave [-1, 1]


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


SHAPES = [(3, 1, 1), (4, 2000, 6), (300, 500, 4), (3, 70000, 16)]
build = jax.jit(hash_tables.build, static_argnums=2)
tally = jax.jit(hash_tables.tally, static_argnums=3)
select = jax.jit(hash_tables.select, static_argnums=1)


def unpack(words) -> np.ndarray:
    return np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little").astype(bool)


def pack(bits: np.ndarray) -> jnp.ndarray:
    bits = np.pad(bits, (0, -len(bits) % hash_tables.WORD))
    return jnp.asarray(np.packbits(bits, bitorder="little").view(np.uint32))


@pytest.mark.parametrize(("tables", "keys", "bits"), SHAPES)
@pytest.mark.parametrize("kind", ["even", "one bucket", "empty"])
def test_a_bucket_has_the_keys_of_its_code(tables, keys, bits, kind):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (2, tables, keys)).astype(np.int32)
    valid = rng.random((2, keys)) < 0.8
    if kind == "one bucket":
        codes[:] = 1
    if kind == "empty":
        valid[:] = False
    built = [build(codes[head], valid[head], bits) for head in (0, 1)]
    stacked = Tables(*(jnp.stack(leaves)[None] for leaves in zip(*built, strict=True)))
    assert sum(leaf.nbytes for leaf in stacked) == 2 * hash_tables.nbytes(keys, bits, tables)
    code = codes[0, :, 0]
    for head in (0, 1):
        agree = ((codes[head] == code[:, None]) & valid[head]).sum(axis=0)
        actual = unpack(tally(stacked, jnp.int32(head), code, keys))
        np.testing.assert_array_equal(actual[:keys], agree >= 2)
        assert not actual[keys:].any()


@pytest.mark.parametrize("size", [1, 128, 300])
def test_codes_of_the_tail_are_compared_up_to_the_last(rng, size):
    tail, code = rng.integers(0, 4, (1, 2, 5, size)), np.array([0, 1, 2, 3, 0])
    agree = (tail[0, 1] == code[:, None]).sum(axis=0) >= 2
    for last in {-1, size // 2, size - 1}:
        arrays = (jnp.asarray(array) for array in (tail.astype(np.int32), 1, code, last))
        words = hash_tables.compare(*arrays)
        actual = unpack(words)
        np.testing.assert_array_equal(actual[:size], agree & (np.arange(size) <= last))
        assert not actual[size:].any()


@pytest.mark.parametrize(("total", "max_places"), [(7, 3), (100, 64), (64, 63)])
def test_of_more_places_than_fit_each_is_drawn_equally_often(total, max_places):
    """Over `total` equidistant draws each place is selected exactly `max_places` times."""
    draws = (jnp.arange(total, dtype=jnp.float32) + 0.5) / total
    words = pack(np.ones(total, bool))
    every = jax.vmap(lambda draw: hash_tables.select(words, max_places, draw).places)(draws)
    np.testing.assert_array_equal(
        np.bincount(np.asarray(every).ravel()), np.full(total, max_places)
    )


@pytest.mark.parametrize("max_places", [1, 7, 60, 97])
def test_selection_at_once_equals_that_by_head(rng, max_places):
    """For no match, few, as many as fit, more, and all."""
    share = np.array([[0, 0.02, 0.08], [0.5, 0.9, 1]])[..., None]
    matching = rng.random((2, 3, 97)) < share
    draw = jnp.asarray(rng.random((2, 3)), jnp.float32)
    at_once = hash_tables.select_at_once(jnp.asarray(matching), max_places, draw)
    for head in np.ndindex(2, 3):
        by_head = select(pack(matching[head]), max_places, draw[head])
        assert (by_head.count, by_head.total) == (at_once.count[head], at_once.total[head])
        count = int(by_head.count)
        np.testing.assert_array_equal(at_once.places[head][:count], by_head.places[:count])


def test_ranks_of_large_samples_do_not_overflow():
    total, max_places = 2_000_003, hash_tables.MAX_FOUND
    selected = select(pack(np.ones(total, bool)), max_places, jnp.float32(0.999999))
    begin = min(int(np.float32(0.999999) * np.float32(total)), total - 1)
    expected = (np.arange(max_places, dtype=np.int64) * total + begin) // max_places
    np.testing.assert_array_equal(np.asarray(selected.places), expected)
