"""Operations on sequences of a state: take, put, reset, bytes, host copies and snapshots."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.errors import UserError
from jaxkv.rotary import rotary
from jaxkv.rows import Int8Rows
from jaxkv.state import batch
from tests.core.tokens import chunk, state_after


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


def check_same(actual, expected):
    """Equal in structure, dtype and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_take_and_put_are_inverse(rng):
    state, source = state_of(rng), state_of(rng)
    order = [2, 0]
    changed = batch.put(state, order, batch.take(source, order))
    check_same(batch.take(changed, order), batch.take(source, order))
    check_same(batch.take(changed, [1]), batch.take(state, [1]))
    check_same(batch.put(changed, order, batch.take(state, order)), state)


def test_indices_may_be_traced(rng):
    state = state_of(rng)
    check_same(jax.jit(batch.take)(state, jnp.array([1, 1])), batch.take(state, [1, 1]))


def test_reset_takes_one_empty_sequence_or_one_per_index(rng):
    state, fresh = state_of(rng), state_of(rng, size=2)
    check_same(batch.take(batch.reset(state, [2, 0], fresh), [2, 0]), fresh)
    empty = batch.take(fresh, [0])
    check_same(batch.take(batch.reset(state, [2, 0], empty), [2, 0]), batch.take(fresh, [0, 0]))


@pytest.mark.parametrize("wrong", [[3], [0, -1], np.array([0.5]), np.array([True, False])])
def test_unknown_indices_are_refused(rng, wrong):
    state = state_of(rng)
    for call in (lambda: batch.take(state, wrong), lambda: batch.put(state, wrong, state)):
        with pytest.raises(UserError, match="indices of sequences must be from 0 to 2, got"):
            call()


def test_sequences_that_do_not_fit_are_refused(rng):
    state = state_of(rng)
    with pytest.raises(
        UserError, match=r"\.part\.k takes bfloat16\[1,2,4,5\].*\[1,2,6,5\].*reserve"
    ):
        batch.put(state, [0], state_of(rng, size=1, slots=6))
    with pytest.raises(UserError, match=r"put once, got \[1, 1\]"):
        batch.put(state, [1, 1], batch.take(state, [0, 2]))
    with pytest.raises(UserError, match="fresh must have 1 or 3 sequences, got 2; give as many"):
        batch.reset(state, [0, 1, 2], state_of(rng, size=2))


def test_bytes_of_arrays_and_of_shapes(rng):
    state = state_of(rng)
    assert batch.nbytes(state) == 3 * (2 * 4 * 5 * 2 + 2 * 2 * 4 + 4)
    assert batch.nbytes(jax.eval_shape(lambda: state)) == batch.nbytes(state)
    assert batch.nbytes((state, state)) == 2 * batch.nbytes(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_snapshot_is_exact(tmp_path, rng, dtype):
    state = (state_of(rng, dtype=dtype), state_of(rng, slots=0))
    batch.save(tmp_path / "snapshot", state)
    assert os.listdir(tmp_path) == ["snapshot"]
    check_same(batch.load(tmp_path / "snapshot", jax.eval_shape(lambda: state)), state)


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
    check_same(batch.load(path, state_of(rng, slots=9), any_size=True), state)
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
    check_same(batch.load(path, state, "window:window=4 of tiny"), state)
    with pytest.raises(UserError, match="4 of tiny', got 'full'"):
        batch.load(path, state, "full")
    with pytest.raises(UserError, match="got ''; give its own identity"):
        batch.load(path, state)


@pytest.mark.parametrize("content", [b"", b"text", "cut", "flipped"])
def test_invalid_snapshot_files_are_refused(tmp_path, rng, content):
    path, state = tmp_path / "snapshot", state_of(rng)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        batch.save(path, state)
        content_bytes = bytearray(path.read_bytes())
        at = content_bytes.find(np.asarray(state.part.k).tobytes())
        content_bytes[at + 5] ^= 1
        path.write_bytes(content_bytes if content == "flipped" else content_bytes[:-40])
    with pytest.raises(UserError, match=r"whole file written by jaxkv\.state\.batch\.save"):
        batch.load(path, state)


@pytest.fixture
def in_int8(rng):
    """The state of a ring of five slots with three tokens, of which one is all zeros."""
    spec = jaxkv.Spec(kv_heads=2, head_dim=8, scale=1.0, encoding=rotary(8, 100.0))
    policy = jaxkv.policy("window:window=5,storage=int8")
    tokens = chunk(spec, 3, rng=rng)
    k, v = (leaf.at[:, 1].set(0) for leaf in (tokens.k, tokens.v))
    return (state_after(policy, spec, tokens._replace(k=k, v=v)),)


def with_scale(state, scale, slot):
    """The state with this scale of the value in one slot of the last KV head."""
    (ring,) = state
    wrong = ring.v.scale.at[0, 1, slot].set(scale)
    return (ring._replace(v=ring.v._replace(scale=wrong)),)


def test_a_row_of_zeros_and_an_empty_slot_are_loaded(tmp_path, in_int8):
    (ring,) = in_int8
    assert isinstance(ring.k, Int8Rows) and not np.asarray(ring.k.values[:, :, 1]).any()
    assert (np.asarray(ring.k.scale[0, 0, :, 0]) > 0).tolist() == [True] * 3 + [False] * 2
    batch.save(tmp_path / "state", in_int8)
    check_same(batch.load(tmp_path / "state", in_int8), in_int8)


@pytest.mark.parametrize("slot", [0, 1, 4], ids=["token", "zeros", "empty"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1e-38])
def test_scales_that_no_row_has_are_refused(tmp_path, in_int8, scale, slot):
    path, wrong = tmp_path / "state", with_scale(in_int8, scale, slot)
    batch.save(path, wrong)
    with pytest.raises(batch.BadScale, match=r"finite, and above 0 .*; load an older") as raised:
        batch.load(path, in_int8)
    received = float(wrong[0].v.scale[0, 1, slot, 0])
    assert f"{path}: [0].v has {received:g}; " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_the_scale_of_a_token_is_not_0(tmp_path, in_int8, scale):
    batch.save(tmp_path / "state", with_scale(in_int8, scale, 2))
    with pytest.raises(batch.BadScale, match=r"above 0 where a token is stored: .* has -?0; load"):
        batch.load(tmp_path / "state", in_int8)


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
