"""Hash tables, counts of matching tables, and selection, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies.magicpig import hash_tables
from jaxkv.policies.magicpig.hash_tables import Tables
from tests.seldom import seldom

SHAPES = [(3, 1, 1), (5, 100, 3), (4, 2000, 6), (300, 500, 4), seldom(3, 70000, 16)]
build = jax.jit(hash_tables.build, static_argnums=2)
tally = jax.jit(hash_tables.tally, static_argnums=(3, 4))
compare = jax.jit(hash_tables.compare, static_argnums=4)
select = jax.jit(hash_tables.select, static_argnums=1)


def unpack(words) -> np.ndarray:
    return np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little").astype(bool)


def pack(found: np.ndarray) -> jnp.ndarray:
    found = np.pad(found, (0, -len(found) % hash_tables.WORD))
    return jnp.asarray(np.packbits(found, bitorder="little").view(np.uint32))


@pytest.mark.parametrize(("tables", "keys", "bits"), SHAPES)
@pytest.mark.parametrize("kind", ["even", "one bucket", "empty"])
def test_a_bucket_has_the_keys_of_its_code(tables, keys, bits, kind):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (2, tables, keys)).astype(np.int32)
    there = rng.random((2, keys)) < 0.8
    if kind == "one bucket":
        codes[:] = 1
    if kind == "empty":
        there[:] = False
    built = [build(codes[head], there[head], bits) for head in (0, 1)]
    both = Tables(*(jnp.stack(leaves)[None] for leaves in zip(*built, strict=True)))
    assert sum(leaf.nbytes for leaf in both) == 2 * hash_tables.nbytes(keys, bits, tables)
    code = codes[0, :, 0]
    for head in (0, 1):
        agree = ((codes[head] == code[:, None]) & there[head]).sum(axis=0)
        for least in (1, 2):
            found = unpack(tally(both, jnp.int32(head), code, keys, least))
            np.testing.assert_array_equal(found[:keys], agree >= least)
            assert not found[keys:].any()


@pytest.mark.parametrize(("tables", "size"), [(3, 1), (5, 31), (150, 200), (300, 500)])
@pytest.mark.parametrize("share", [-1.0, 0.0, 0.5, 1.0])
def test_all_codes_of_the_tail_are_compared(tables, size, share):
    rng = np.random.default_rng(2)
    tail = rng.integers(0, 16, (2, 1, tables, size)).astype(np.uint16)
    code, last = tail[1, 0, :, 0].astype(np.int32), int(share * (size - 1)) if share >= 0 else -1
    agree = (tail[1, 0] == code[:, None]).sum(axis=0)
    agree[last + 1 :] = 0
    for least in (1, 2):
        found = unpack(compare(tail, jnp.int32(1), code, jnp.int32(last), least))
        np.testing.assert_array_equal(found[:size], agree >= least)
        assert not found[size:].any()


@pytest.mark.parametrize(("size", "most"), [(1, 1), (31, 7), (100, 100), (5000, 60)])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_found_places_are_selected_in_order(size, most, share):
    rng = np.random.default_rng(1)
    bits = rng.random(size) < share
    found = select(pack(bits), most, jnp.float32(rng.random()))
    places, count = np.asarray(found.places), int(found.count)
    assert int(found.total) == bits.sum() and count == min(most, bits.sum())
    assert (np.diff(places[:count]) > 0).all() and bits[places[:count]].all()
    if bits.sum() <= most:
        np.testing.assert_array_equal(places[:count], np.flatnonzero(bits))


@pytest.mark.parametrize(("total", "most"), [(7, 3), (100, 64), (64, 63)])
def test_of_more_places_than_fit_each_is_drawn_equally_often(total, most):
    """Over `total` equidistant draws each place is selected exactly `most` times."""
    draws = (jnp.arange(total, dtype=jnp.float32) + 0.5) / total
    words = pack(np.ones(total, bool))
    every = jax.vmap(lambda draw: hash_tables.select(words, most, draw).places)(draws)
    np.testing.assert_array_equal(np.bincount(np.asarray(every).ravel()), np.full(total, most))


def test_ranks_of_large_samples_do_not_overflow():
    total, most = 2_000_003, hash_tables.MAX_FOUND
    found = select(pack(np.ones(total, bool)), most, jnp.float32(0.999999))
    begin = min(int(np.float32(0.999999) * np.float32(total)), total - 1)
    wanted = (np.arange(most, dtype=np.int64) * total + begin) // most
    np.testing.assert_array_equal(np.asarray(found.places), wanted)
