"""Hash tables, counts of matching tables, and selection, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies.magicpig import hash_tables
from jaxkv.policies.magicpig.hash_tables import Tables

SHAPES = [(3, 1, 1), (5, 100, 3), (4, 2000, 6), (300, 500, 4), (3, 70000, 16)]
build = jax.jit(hash_tables.build, static_argnums=2)
tally = jax.jit(hash_tables.tally, static_argnums=(3, 4))
compare = jax.jit(hash_tables.compare, static_argnums=4)
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
        for min_tables in (1, 2):
            actual = unpack(tally(stacked, jnp.int32(head), code, keys, min_tables))
            np.testing.assert_array_equal(actual[:keys], agree >= min_tables)
            assert not actual[keys:].any()


@pytest.mark.parametrize(("tables", "size"), [(3, 1), (5, 31), (150, 200), (300, 500)])
@pytest.mark.parametrize("share", [-1.0, 0.0, 0.5, 1.0])
def test_all_codes_of_the_tail_are_compared(tables, size, share):
    rng = np.random.default_rng(2)
    tail = rng.integers(0, 16, (2, 1, tables, size)).astype(np.uint16)
    code, last = tail[1, 0, :, 0].astype(np.int32), int(share * (size - 1)) if share >= 0 else -1
    agree = (tail[1, 0] == code[:, None]).sum(axis=0)
    agree[last + 1 :] = 0
    for min_tables in (1, 2):
        actual = unpack(compare(tail, jnp.int32(1), code, jnp.int32(last), min_tables))
        np.testing.assert_array_equal(actual[:size], agree >= min_tables)
        assert not actual[size:].any()


@pytest.mark.parametrize(("size", "max_places"), [(1, 1), (31, 7), (100, 100), (5000, 60)])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_found_places_are_selected_in_order(size, max_places, share):
    rng = np.random.default_rng(1)
    bits = rng.random(size) < share
    selected = select(pack(bits), max_places, jnp.float32(rng.random()))
    places, count = np.asarray(selected.places), int(selected.count)
    assert int(selected.total) == bits.sum() and count == min(max_places, bits.sum())
    assert (np.diff(places[:count]) > 0).all() and bits[places[:count]].all()
    if bits.sum() <= max_places:
        np.testing.assert_array_equal(places[:count], np.flatnonzero(bits))


@pytest.mark.parametrize(("total", "max_places"), [(7, 3), (100, 64), (64, 63)])
def test_of_more_places_than_fit_each_is_drawn_equally_often(total, max_places):
    """Over `total` equidistant draws each place is selected exactly `max_places` times."""
    draws = (jnp.arange(total, dtype=jnp.float32) + 0.5) / total
    words = pack(np.ones(total, bool))
    every = jax.vmap(lambda draw: hash_tables.select(words, max_places, draw).places)(draws)
    np.testing.assert_array_equal(
        np.bincount(np.asarray(every).ravel()), np.full(total, max_places)
    )


def test_ranks_of_large_samples_do_not_overflow():
    total, max_places = 2_000_003, hash_tables.MAX_FOUND
    selected = select(pack(np.ones(total, bool)), max_places, jnp.float32(0.999999))
    begin = min(int(np.float32(0.999999) * np.float32(total)), total - 1)
    expected = (np.arange(max_places, dtype=np.int64) * total + begin) // max_places
    np.testing.assert_array_equal(np.asarray(selected.places), expected)
