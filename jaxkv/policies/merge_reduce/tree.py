"""Merge and reduce (after Algorithm 3 of BalanceKV, 2502.07861): a stream sampled in levels.

Tokens fill level 0. A full level 0 is halved, and the half that stays goes to level 1, where each
token counts twice. If level 1 already stores a half, both halves are halved together and the result
goes to level 2, and so on, like a carry in binary addition.

The fixed number of levels is ours. Algorithm 3 never halves its last level, which grows with the
stream. Here, when the last level already stores a half, the half of both stays there and every
multiplicity doubles: from then on level 0 takes one token of two, of four, and so on, drawn for
each group. So memory stays constant for any length of stream.

The number of tokens so far says how full each level is (occupancy.py).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.cache import per_head
from jaxkv.cache.per_head import Evicted, PerHeadTokens, pick, put, rerotate
from jaxkv.contract import Spec
from jaxkv.policies.discrepancy import Halving, halve
from jaxkv.policies.merge_reduce.occupancy import (
    TreeSize,
    filled_slots,
    group_size_and_start,
    token_of_slot,
    tokens_until_full,
)
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Int32

# `num_evicted`, the number of tokens so far, is halved when it reaches this, so it never wraps. The
# weight of every stored token is halved with it, so text before that point counts less.
HALVE_COUNT_AT = np.uint32(2**31)


class Reducer(NamedTuple):
    """The settings of a tree.

    cache_relative: halving sees keys rotated to consecutive positions, and not to their positions
    in the text. Floats are stored rotated to their slot within a half. Halving rotates them again,
    which happens to a token once as the stream doubles. storage: rows in int8 stay rotated to their
    positions in the text, because a rotation would round them again.
    """

    size: TreeSize
    halving: Halving
    cache_relative: bool
    spec: Spec
    storage: Storage = "float"

    @property
    def stored_at_slot(self) -> bool:
        """Whether keys are stored rotated to their slot within a half."""
        return self.cache_relative and self.storage == "float"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def absorb(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, rng: Array, evicted: Evicted
) -> tuple[PerHeadTokens, Array]:
    """The levels and `num_evicted` after all evicted tokens were absorbed."""
    single = evicted.tokens.positions.shape[2] == 1
    return (_absorb_one if single else _absorb)(reducer, sample, num_evicted, rng, evicted)


def _absorb_one(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, rng: Array, evicted: Evicted
) -> tuple[PerHeadTokens, Array]:
    size, token, valid = reducer.size, evicted.tokens, evicted.valid[:, 0]
    r, start = group_size_and_start(size, num_evicted)
    slot = jnp.minimum((num_evicted - start) >> r, np.uint32(size.block - 1))
    picked = token_of_slot(size, num_evicted[:, None], rng)[:, :, 0] == num_evicted[:, None, None]
    takes = valid[:, None] & jnp.any(picked, axis=2)
    if reducer.stored_at_slot:  # the KV heads of a sequence evict the same token
        rotated = reducer.spec.encoding.rerotate(
            token.k.transpose(0, 2, 1, 3),
            slot[:, None] % np.uint32(size.half) - token.positions[:, 0],
        )
        token = token._replace(k=rotated.transpose(0, 2, 1, 3))
    at = jnp.broadcast_to(slot.astype(jnp.int32)[:, None], takes.shape)
    sample = put(sample, at, takes, token)
    return _reduce(reducer, sample, num_evicted, num_evicted + valid.astype(jnp.uint32), rng)


def _absorb(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, rng: Array, evicted: Evicted
) -> tuple[PerHeadTokens, Array]:
    """A block at a time."""
    order, count = _order_of(evicted)

    def unfinished(carry: tuple) -> Array:
        return jnp.any(carry[2] < count)

    def absorb_block(carry: tuple) -> tuple:
        sample, num_evicted, done = carry
        sample = _fill_level_0(
            reducer, sample, num_evicted, rng, evicted.tokens, order, done, count
        )
        room = tokens_until_full(reducer.size, num_evicted)
        step = jnp.minimum(room.astype(jnp.int32), count - done)
        after = num_evicted + step.astype(jnp.uint32)
        sample, num_evicted = _reduce(reducer, sample, num_evicted, after, rng)
        return sample, num_evicted, done + step

    start = sample, num_evicted, jnp.zeros_like(count)
    sample, num_evicted, _ = jax.lax.while_loop(unfinished, absorb_block, start)
    return sample, num_evicted


def _absorb_for_gradients(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, rng: Array, evicted: Evicted
) -> tuple[tuple[PerHeadTokens, Array], tuple]:
    absorbed = absorb(reducer, sample, num_evicted, rng, evicted)
    return absorbed, (sample, num_evicted, rng, evicted, absorbed[0].positions)


def _gradients(reducer: Reducer, seen: tuple, cotangents: tuple) -> tuple:
    """The gradients of `absorb`, found by matching positions.

    A while loop has no reverse derivative. But this one only moves tokens between slots, and the
    position of a token says which slot it came from.
    """
    if reducer.storage == "int8":
        return None, None, None, None
    sample, num_evicted, rng, evicted, positions = seen
    sequence, new = jnp.arange(len(num_evicted))[:, None], evicted.tokens
    was_evicted = (
        jnp.zeros(new.positions[:, 0].shape, bool).at[sequence, evicted.index].max(evicted.valid)
    )
    valid = [
        jnp.broadcast_to(was_evicted[:, None], new.positions.shape),
        filled_slots(reducer.size, num_evicted[:, None], rng)[:, :, 0],
    ]
    candidates = per_head.join(new, sample)
    matches = candidates.positions[:, :, None] == positions[..., None]
    source = jnp.argmax(matches & jnp.concatenate(valid, axis=2)[:, :, None], axis=3)
    slot = jax.lax.broadcasted_iota(jnp.uint32, positions.shape, 2) % np.uint32(reducer.size.half)
    rotated_to = jnp.concatenate([new.positions, slot], axis=2)
    by = slot - jnp.take_along_axis(rotated_to, source, axis=2)

    def move_tokens(sample: PerHeadTokens, new: PerHeadTokens) -> tuple[Array, Array]:
        moved = pick(per_head.join(new, sample), source)
        return rerotate(reducer.spec, moved.k, by) if reducer.cache_relative else moved.k, moved.v

    pull_back = jax.vjp(
        lambda k, v, new_k, new_v: move_tokens(
            sample._replace(k=k, v=v), new._replace(k=new_k, v=new_v)
        ),
        *sample[:2],
        *new[:2],
    )[1]
    k, v, new_k, new_v = pull_back((cotangents[0].k, cotangents[0].v))
    return (
        PerHeadTokens(k, v, None),
        None,
        None,
        Evicted(PerHeadTokens(new_k, new_v, None), None, None),
    )


absorb.defvjp(_absorb_for_gradients, _gradients)


def fill_level_0(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, rng: Array, evicted: Evicted
) -> PerHeadTokens:
    """The levels after level 0 took evicted tokens until it is full, before any halving."""
    order, count = _order_of(evicted)
    done = jnp.zeros_like(count)
    return _fill_level_0(reducer, sample, num_evicted, rng, evicted.tokens, order, done, count)


def _order_of(evicted: Evicted) -> tuple[Int32[Array, "B X"], Int32[Array, " B"]]:
    """The place of the n-th evicted token in evicted.tokens, and the number of evicted tokens."""
    _, index, valid = evicted
    sequence = jnp.arange(valid.shape[0])[:, None]
    gone = jnp.cumsum(valid.astype(jnp.int32), axis=1)
    order = jnp.zeros((valid.shape[0], valid.shape[1] + 1), jnp.int32)
    return order.at[sequence, jnp.where(valid, gone - 1, -1)].set(index), gone[:, -1]


def _fill_level_0(
    reducer: Reducer,
    sample: PerHeadTokens,
    num_evicted: Array,
    rng: Array,
    tokens: PerHeadTokens,
    order: Array,
    done: Array,
    count: Array,
) -> PerHeadTokens:
    """Level 0 takes its tokens, from the `done`-th evicted one on, until it is full."""
    chosen = token_of_slot(reducer.size, num_evicted[:, None], rng)[:, :, 0]
    offset = chosen - num_evicted[:, None, None]
    takes = offset < (count - done).astype(jnp.uint32)[:, None, None]
    number = jnp.where(takes, offset.astype(jnp.int32) + done[:, None, None], 0)
    new = pick(tokens, jax.vmap(lambda tokens, at: tokens[at])(order, number))
    if reducer.stored_at_slot:
        slot = jax.lax.broadcasted_iota(jnp.uint32, takes.shape, 2) % np.uint32(reducer.size.half)
        new = new._replace(k=rerotate(reducer.spec, new.k, slot - new.positions))
    return _write(sample, new, 0, takes)


def _cut(sample: PerHeadTokens, at: int | Array, size: int) -> PerHeadTokens:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, at, size, 2), sample)


def _write(
    sample: PerHeadTokens, new: PerHeadTokens, at: int | Array, takes: Bool[Array, "B ... #S"]
) -> PerHeadTokens:
    """The sample with `new` in the slots from `at` on, where `takes`."""

    def write_leaf(old: Array, new: Array) -> Array:
        before = jax.lax.dynamic_slice_in_dim(old, at, new.shape[2], 2)
        wide = takes if old.ndim == 3 else takes[..., None]
        new = jnp.where(wide, new.astype(old.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2)

    return jax.tree.map(write_leaf, sample, new)


def _reduce(
    reducer: Reducer, sample: PerHeadTokens, num_evicted: Array, after: Array, rng: Array
) -> tuple[PerHeadTokens, Array]:
    """Halve the full levels when the number of evicted tokens goes from `num_evicted` to `after`.

    The two are at most one block apart.
    """
    size = reducer.size
    r, _ = group_size_and_start(size, num_evicted)
    fill_tokens = np.uint32(size.block) << r
    blocks = after // fill_tokens  # that filled level 0
    full = (after != num_evicted) & (after % fill_tokens == 0)
    top = np.uint32(size.levels - 1)

    def merges(level: Array) -> Bool[Array, " B"]:
        """Sequences in which the half that comes to `level` finds another there."""
        last = after == np.uint32(size.before) << r
        return full & jnp.where(level < top, blocks % (np.uint32(1) << level) == 0, last)

    def unfinished(carry: tuple) -> Array:
        level, _ = carry
        return (level <= top) & jnp.any(merges(level))

    def merge_level(carry: tuple) -> tuple:
        level, sample = carry
        next_level = level + np.uint32(1)
        carries = merges(next_level) & (level < top)
        half = _halve_level(reducer, sample, level, after, rng)
        # Where the next level stores a half already, the new one waits in level 0, now empty.
        slot = _first_slot_of_level(reducer, jnp.where(level < top, next_level, level))
        takes = merges(level)
        sample = _write(sample, half, slot, (takes & ~carries)[:, None, None])
        sample = _write(sample, half, size.half, (takes & carries)[:, None, None])
        return next_level, sample

    # A loop that mostly runs zero times: a branch per level would copy the sample and compile more.
    _, sample = jax.lax.while_loop(unfinished, merge_level, (jnp.zeros((), jnp.uint32), sample))
    return sample, jnp.where(after == HALVE_COUNT_AT, after // np.uint32(2), after)


def _first_slot_of_level(reducer: Reducer, level: Array) -> Int32[Array, ""]:
    """The slot where a level's older half begins."""
    return jnp.where(level == 0, 0, reducer.size.half * (level.astype(jnp.int32) + 1))


def _halve_level(
    reducer: Reducer, sample: PerHeadTokens, level: Array, after: Array, rng: Array
) -> PerHeadTokens:
    """Halve a level together with the half that waits in the second half of level 0.

    Returns the half that stays.
    """
    block, half = reducer.size.block, reducer.size.half
    older = _cut(sample, _first_slot_of_level(reducer, level), half)
    newer = _cut(sample, half, half)
    joined = per_head.join(older, newer)
    keys, values = rows.dequantise(joined.k), rows.dequantise(joined.v)
    if reducer.cache_relative:  # at consecutive positions
        place = jax.lax.broadcasted_iota(jnp.uint32, keys.shape[:3], 2)
        rotated_to = place % np.uint32(half) if reducer.stored_at_slot else joined.positions
        keys = rerotate(reducer.spec, keys, place - rotated_to)
    number = level * np.uint32(block) + jnp.arange(block, dtype=jnp.uint32)
    uniforms = draws.uniforms(after[:, None, None] * draws.GOLDEN + number[None, None], rng)
    chosen = halve(reducer.halving, reducer.spec.scale, keys, values, uniforms).chosen
    stays = pick(joined, chosen)
    if reducer.stored_at_slot:
        slot = jax.lax.broadcasted_iota(jnp.uint32, chosen.shape, 2)
        old_slot = chosen.astype(jnp.uint32) % np.uint32(half)
        stays = stays._replace(k=rerotate(reducer.spec, stays.k, slot - old_slot))
    return stays
