"""Operations on sequences of a state: take, put, reset, bytes, host copies and snapshots."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.state import batch


class Part(NamedTuple):
    k: jax.Array
    rng: jax.Array


class State(NamedTuple):
    part: Part
    count: jax.Array


def state_of(rng, size=3, slots=4, dtype=jnp.bfloat16):
    k = jnp.asarray(rng.normal(size=(size, 2, slots, 5)), dtype)
    seeds = jnp.asarray(rng.integers(0, 2**32, (size, 2, 2), np.uint32))
    return State(Part(k, seeds), jnp.arange(size, dtype=jnp.int32))


def same(one, other):
    """Equal in structure, dtype and every bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_take_and_put_are_inverse(rng):
    state, other = state_of(rng), state_of(rng)
    order = [2, 0]
    changed = batch.put(state, order, batch.take(other, order))
    same(batch.take(changed, order), batch.take(other, order))
    same(batch.take(changed, [1]), batch.take(state, [1]))
    same(batch.put(changed, order, batch.take(state, order)), state)


def test_indices_may_be_traced(rng):
    state = state_of(rng)
    same(jax.jit(batch.take)(state, jnp.array([1, 1])), batch.take(state, [1, 1]))


def test_reset_takes_one_empty_sequence_or_one_per_index(rng):
    state, fresh = state_of(rng), state_of(rng, size=2)
    same(batch.take(batch.reset(state, [2, 0], fresh), [2, 0]), fresh)
    one = batch.take(fresh, [0])
    same(batch.take(batch.reset(state, [2, 0], one), [2, 0]), batch.take(fresh, [0, 0]))
    with pytest.raises(UserError, match="fresh must have 1 or 3 sequences, got 2; give as many"):
        batch.reset(state, [0, 1, 2], fresh)


def test_sequences_of_another_shape_are_refused(rng):
    taken = r"\.part\.k takes bfloat16\[1,2,4,5\].*\[1,2,6,5\].*reserve"
    with pytest.raises(UserError, match=taken):
        batch.put(state_of(rng), [0], state_of(rng, size=1, slots=6))


@pytest.mark.parametrize(
    "wrong", [[3], [0, -1], np.array([7]), np.array([0.5]), np.array([True, False])]
)
def test_unknown_indices_are_refused(rng, wrong):
    state = state_of(rng)
    with pytest.raises(UserError, match="indices of sequences must be from 0 to 2, got"):
        batch.take(state, wrong)
    with pytest.raises(UserError, match="indices of sequences must be from 0 to 2, got"):
        batch.put(state, wrong, state)


def test_a_repeated_index_is_refused(rng):
    state = state_of(rng)
    with pytest.raises(UserError, match=r"put once, got \[1, 1\]"):
        batch.put(state, [1, 1], batch.take(state, [0, 2]))


def test_bytes_of_arrays_and_of_shapes(rng):
    state = state_of(rng)
    assert batch.nbytes(state) == 3 * (2 * 4 * 5 * 2 + 2 * 2 * 4 + 4)
    assert batch.nbytes(jax.eval_shape(lambda: state)) == batch.nbytes(state)
    assert batch.nbytes((state, state)) == 2 * batch.nbytes(state)


def test_host_round_trip_is_exact(rng):
    state = state_of(rng)
    host = batch.to_host(state)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(host))
    same(batch.to_device(host), state)
    same(batch.take(host, [1, 2]), batch.take(state, [1, 2]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_snapshot_is_exact(tmp_path, rng, dtype):
    state = (state_of(rng, dtype=dtype), state_of(rng, slots=0))
    batch.save(tmp_path / "snapshot", state)
    assert os.listdir(tmp_path) == ["snapshot"]
    same(batch.load(tmp_path / "snapshot", jax.eval_shape(lambda: state)), state)


def test_snapshot_of_another_state_is_refused(tmp_path, rng):
    path, state = tmp_path / "snapshot", state_of(rng)
    batch.save(path, state)
    with pytest.raises(UserError, match=r"\.part\.k should be bfloat16\[3,2,9,5\], is bfloat16\[3"):
        batch.load(path, state_of(rng, slots=9))
    with pytest.raises(UserError, match=r"\.part\.k should be float32"):
        batch.load(path, state_of(rng, dtype=jnp.float32))
    with pytest.raises(UserError, match=r"\.k should be .*, is absent"):
        batch.load(path, state.part)


def test_a_snapshot_of_another_size_is_read_if_that_is_asked_for(tmp_path, rng):
    path, state = tmp_path / "snapshot", state_of(rng)
    batch.save(path, state)
    same(batch.load(path, state_of(rng, slots=9), any_size=True), state)
    with pytest.raises(UserError, match=r"\.part\.k should be float32"):
        batch.load(path, state_of(rng, dtype=jnp.float32), any_size=True)


def test_notes_are_stored_with_a_snapshot(tmp_path, rng):
    path, notes = tmp_path / "snapshot", {"messages": [{"content": "Ä"}], "length": 3}
    batch.save(path, state_of(rng), "a session", notes)
    assert batch.read_notes(path, "a session") == notes
    with pytest.raises(UserError, match="got 'another'"):
        batch.read_notes(path, "another")
    batch.save(path, state_of(rng))
    assert batch.read_notes(path) == {}


def test_a_snapshot_of_another_identity_is_refused(tmp_path, rng):
    path, state = tmp_path / "snapshot", state_of(rng)
    batch.save(path, state, "window:window=4 of tiny")
    same(batch.load(path, state, "window:window=4 of tiny"), state)
    with pytest.raises(UserError, match="4 of tiny', got 'full'"):
        batch.load(path, state, "full")
    with pytest.raises(UserError, match="got ''; give its own identity"):
        batch.load(path, state)


@pytest.mark.parametrize("content", [b"", b"text", "cut", "flipped", "npz", "npy"])
def test_invalid_snapshot_files_are_refused(tmp_path, rng, content):
    path, state = tmp_path / "snapshot", state_of(rng)
    if content == "npz":
        with path.open("wb") as file:
            np.savez(file, k=np.zeros(3))
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        batch.save(path, state)
        whole = bytearray(path.read_bytes())
        at = whole.find(np.asarray(state.part.k).tobytes())
        whole[at + 5] ^= 1
        path.write_bytes(whole if content == "flipped" else whole[:-40])
    with pytest.raises(UserError, match=r"whole file written by jaxkv\.state\.batch\.save"):
        batch.load(path, state)


def test_missing_paths_are_refused(tmp_path, rng):
    with pytest.raises(UserError, match="No such file"):
        batch.load(tmp_path / "absent", state_of(rng))
    with pytest.raises(UserError, match="No such file"):
        batch.save(tmp_path / "no" / "folder", state_of(rng))


def test_a_failed_save_keeps_the_old_snapshot(tmp_path, rng, monkeypatch):
    path, state = tmp_path / "snapshot", state_of(rng)
    batch.save(path, state)
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        batch.save(path, state_of(rng, slots=7))
    assert os.listdir(tmp_path) == ["snapshot"] and path.read_bytes() == before
