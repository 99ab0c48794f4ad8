"""Merge and reduce (after Algorithm 3 of BalanceKV, 2502.07861): a sample of a stream in levels.

Tokens fill level 0. When it is full it is halved, and the half that stays goes to level 1, where
each token counts for two. If that level has a half already, both are halved together and what
stays goes on to level 2, and so on, like a carry in binary numbers.

A fixed number of levels is ours: Algorithm 3 never halves its last level, which grows with the
stream (jaxkv/balancekv.py). Here, where the last level has a half already, the half of both stays
there and every count doubles: from then on level 0 takes one token of two, of four, and so on,
drawn anew for each group. So memory stays as it is however long the stream.

How full each level is follows from the number of tokens that came (jaxkv/occupancy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv.contract import Spec
from jaxkv.occupancy import Shape, chosen_of, first_group, held, tokens_until_full
from jaxkv.sample import Leaving, Sample, move, pick, put, uniforms
from jaxkv.typing import Array, Bool, Int32

# keys, values [B,K,t,H], uniforms [B,K,t] -> which half, [B,K,t/2], in order
Halve = Callable[[Array, Array, Array], Int32[Array, "B K C"]]
# Where `middle`, the number of tokens that came, reaches this it becomes half of it, so that it
# never wraps. What is held then stands for half as many tokens as came: a longer stream begins to
# forget.
LAST = np.uint32(2**31)


class Reducer(NamedTuple):
    """What a sample is built with.

    local: keys are turned to their slot within a half, not to where they stand in the text. They
    are turned on when they are halved, which befalls a token once as the stream doubles.
    """

    shape: Shape
    halve: Halve
    local: bool
    spec: Spec


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def absorb(
    by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving
) -> tuple[Sample, Array]:
    """The levels and `middle`, the tokens that came to them so far, folded at LAST: both once all
    came that leave the window."""
    one = leaving.tokens.positions.shape[2] == 1
    return (_absorb_one if one else _absorb)(by, sample, middle, key, leaving)


def _absorb_one(
    by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving
) -> tuple[Sample, Array]:
    shape, token, there = by.shape, leaving.tokens, leaving.there[:, 0]
    r, begun = first_group(shape, middle)
    slot = jnp.minimum((middle - begun) >> r, np.uint32(shape.block - 1))
    picked = chosen_of(shape, middle[:, None], key)[:, :, 0] == middle[:, None, None]
    takes = there[:, None] & jnp.any(picked, axis=2)
    if by.local:  # the kv heads of a row have one token here
        turned = by.spec.encoding.move(
            token.k.transpose(0, 2, 1, 3),
            slot[:, None] % np.uint32(shape.half) - token.positions[:, 0],
        )
        token = token._replace(k=turned.transpose(0, 2, 1, 3))
    at = jnp.broadcast_to(slot.astype(jnp.int32)[:, None], takes.shape)
    sample = put(sample, at, takes, *(leaf[:, :, 0] for leaf in token))
    return _reduce(by, sample, middle, middle + there.astype(jnp.uint32), key)


def _absorb(
    by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving
) -> tuple[Sample, Array]:
    """A block at a time."""
    order, left = _order_of(leaving)

    def more(carry: tuple) -> Array:
        return jnp.any(carry[2] < left)

    def one(carry: tuple) -> tuple:
        sample, middle, done = carry
        sample = _enter(by, sample, middle, key, leaving.tokens, order, done, left)
        until = tokens_until_full(by.shape, middle)
        step = jnp.minimum(until.astype(jnp.int32), left - done)
        sample, middle = _reduce(by, sample, middle, middle + step.astype(jnp.uint32), key)
        return sample, middle, done + step

    sample, middle, _ = jax.lax.while_loop(more, one, (sample, middle, jnp.zeros_like(left)))
    return sample, middle


def _absorb_for_gradients(
    by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving
) -> tuple[tuple[Sample, Array], tuple]:
    found = absorb(by, sample, middle, key, leaving)
    return found, (sample, middle, key, leaving, found[0].positions)


def _gradients(by: Reducer, seen: tuple, cotangents: tuple) -> tuple:
    """A loop that runs as often as it must has no reverse derivative. But all it does is to move
    tokens from slot to slot, and by its position each is found again where it came from."""
    sample, middle, key, leaving, positions = seen
    rows, new = jnp.arange(len(middle))[:, None], leaving.tokens
    left = jnp.zeros(new.positions[:, 0].shape, bool).at[rows, leaving.at].max(leaving.there)
    filled = [
        jnp.broadcast_to(left[:, None], new.positions.shape),
        held(by.shape, middle[:, None], key)[:, :, 0],
    ]
    both = drawn.join(new, sample)
    same = both.positions[:, :, None] == positions[..., None]
    source = jnp.argmax(same & jnp.concatenate(filled, axis=2)[:, :, None], axis=3)
    slot = jax.lax.broadcasted_iota(jnp.uint32, positions.shape, 2) % np.uint32(by.shape.half)
    turned_to = jnp.concatenate([new.positions, slot], axis=2)
    turn = slot - jnp.take_along_axis(turned_to, source, axis=2)

    def again(sample: Sample, new: Sample) -> tuple[Array, Array]:
        found = pick(drawn.join(new, sample), source)
        return move(by.spec, found.k, turn) if by.local else found.k, found.v

    back = jax.vjp(
        lambda k, v, new_k, new_v: again(
            sample._replace(k=k, v=v), new._replace(k=new_k, v=new_v)
        ), *sample[:2], *new[:2],
    )[1]  # fmt: skip
    k, v, new_k, new_v = back((cotangents[0].k, cotangents[0].v))
    return Sample(k, v, None), None, None, Leaving(Sample(new_k, new_v, None), None, None)


absorb.defvjp(_absorb_for_gradients, _gradients)


def enter(by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving) -> Sample:
    """The levels with what comes to the first until it is full, before anything is halved."""
    order, left = _order_of(leaving)
    return _enter(by, sample, middle, key, leaving.tokens, order, jnp.zeros_like(left), left)


def _order_of(leaving: Leaving) -> tuple[Int32[Array, "B X"], Int32[Array, " B"]]:
    """The n-th to leave, as a place in leaving.tokens; and how many leave."""
    rows = jnp.arange(leaving.there.shape[0])[:, None]
    gone = jnp.cumsum(leaving.there.astype(jnp.int32), axis=1)
    order = jnp.zeros((leaving.there.shape[0], leaving.there.shape[1] + 1), jnp.int32)
    return order.at[rows, jnp.where(leaving.there, gone - 1, -1)].set(leaving.at), gone[:, -1]


def _enter(
    by: Reducer, sample: Sample, middle: Array, key: Array, tokens: Sample, order: Array,
    done: Array, left: Array,
) -> Sample:  # fmt: skip
    """Of the tokens from the `done`-th on those that level 0 takes until it is full."""
    wanted = chosen_of(by.shape, middle[:, None], key)[:, :, 0] - middle[:, None, None]
    takes = wanted < (left - done).astype(jnp.uint32)[:, None, None]
    number = jnp.where(takes, wanted.astype(jnp.int32) + done[:, None, None], 0)
    new = pick(tokens, jax.vmap(lambda row, at: row[at])(order, number))
    if by.local:
        slot = jax.lax.broadcasted_iota(jnp.uint32, takes.shape, 2) % np.uint32(by.shape.half)
        new = new._replace(k=move(by.spec, new.k, slot - new.positions))
    return _write(sample, new, 0, takes)


def _cut(sample: Sample, at: int | Array, size: int) -> Sample:
    return Sample(*(jax.lax.dynamic_slice_in_dim(leaf, at, size, 2) for leaf in sample))


def _write(sample: Sample, new: Sample, at: int | Array, takes: Bool[Array, "B ... #S"]) -> Sample:
    """The slots from `at` on become `new`, where they take it."""

    def one(old: Array, new: Array) -> Array:
        there = jax.lax.dynamic_slice_in_dim(old, at, new.shape[2], 2)
        wide = takes if old.ndim == 3 else takes[..., None]
        new = jnp.where(wide, new.astype(old.dtype), there)
        return jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2)

    return Sample(*(one(old, new) for old, new in zip(sample, new, strict=True)))


def _reduce(
    by: Reducer, sample: Sample, middle: Array, after: Array, key: Array
) -> tuple[Sample, Array]:
    """Halve what is full once `after` tokens came, at most a block's worth more than `middle`."""
    shape = by.shape
    r, _ = first_group(shape, middle)
    whole = np.uint32(shape.block) << r
    batches = after // whole  # that level 0 has seen
    full = (after != middle) & (after % whole == 0)
    top = np.uint32(shape.levels - 1)

    def meets(level: Array) -> Bool[Array, " B"]:
        """Rows in which the half that comes to `level` finds another there; level 0 is full."""
        last = after == np.uint32(shape.before) << r
        return full & jnp.where(level < top, batches % (np.uint32(1) << level) == 0, last)

    def more(carry: tuple) -> Array:
        level, _ = carry
        return (level <= top) & jnp.any(meets(level))

    def one(carry: tuple) -> tuple:
        level, sample = carry
        further = level + np.uint32(1)
        on = meets(further) & (level < top)
        half = _half_of(by, sample, level, after, key)
        # In row where the next level has a half already, the new one waits in level 0, now empty.
        own = _place_of(by, jnp.where(level < top, further, level))
        takes = meets(level)
        sample = _write(sample, half, own, (takes & ~on)[:, None, None])
        sample = _write(sample, half, shape.half, (takes & on)[:, None, None])
        return further, sample

    # A loop and not branches: one program for all levels, and none of it runs where none is full.
    _, sample = jax.lax.while_loop(more, one, (jnp.zeros((), jnp.uint32), sample))
    return sample, jnp.where(after == LAST, after // np.uint32(2), after)


def _place_of(by: Reducer, level: Array) -> Int32[Array, ""]:
    """The slot where a level's older half begins."""
    return jnp.where(level == 0, 0, by.shape.half * (level.astype(jnp.int32) + 1))


def _half_of(by: Reducer, sample: Sample, level: Array, after: Array, key: Array) -> Sample:
    """What stays of a level and of the half that came to it, which waits in level 0's second."""
    size = by.shape.half
    older, newer = _cut(sample, _place_of(by, level), size), _cut(sample, size, size)
    both = drawn.join(older, newer)
    keys = both.k
    if by.local:  # one behind the other, as they will be met
        place = jax.lax.broadcasted_iota(jnp.uint32, keys.shape[:3], 2)
        keys = move(by.spec, keys, place - place % np.uint32(size))
    number = level * np.uint32(by.shape.block) + jnp.arange(by.shape.block, dtype=jnp.uint32)
    chances = uniforms(after[:, None, None] * drawn.GOLDEN + number[None, None], key)
    chosen = by.halve(keys, both.v, chances)
    half = pick(both, chosen)
    if by.local:
        slot = jax.lax.broadcasted_iota(jnp.uint32, chosen.shape, 2)
        was = chosen.astype(jnp.uint32) % np.uint32(size)
        half = half._replace(k=move(by.spec, half.k, slot - was))
    return half
