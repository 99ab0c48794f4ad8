"""Merge and reduce (Algorithm 3 of BalanceKV, 2502.07861): a sample of a stream in levels.

Tokens fill level 0. When it is full it is halved, and the half that stays goes to level 1, where
each token counts for two. If that level has a half already, both are halved together and what
stays goes on to level 2, and so on, like a carry in binary numbers. Where the last level has one,
the half of both stays there and every count doubles: from then on level 0 takes one token of two,
of four, and so on, drawn anew for each group. So memory stays as it is however long the stream.

How full each level is follows from the number of tokens that came, and so do the counts. With L
levels, of t slots the first and t/2 the others, a token of level 0 stands for 2^r; r grows by one
as the stream doubles, from t 2^(L-1) tokens on.
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
from jaxkv.sample import Leaving, Sample, draws, move, pick, put, uniforms
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

# keys, values [B,K,t,H], uniforms [B,K,t] -> which half, [B,K,t/2], in order
Halve = Callable[[Array, Array, Array], Int32[Array, "B K C"]]
_ODD = np.uint32(0x9E3779B1)  # spreads the draws of one halving from those of the next
# So many tokens are counted as half of them, and what is held as if each stood for half: a stream
# of more than two thousand million tokens begins to forget its beginning.
LAST = np.uint32(2**31)


class Shape(NamedTuple):
    """levels: L. block: t, a power of two, and two at least."""

    levels: int
    block: int

    @property
    def half(self) -> int:
        return self.block // 2

    @property
    def slots(self) -> int:
        """Of all levels: two halves of the first, one of each other."""
        return self.half * (self.levels + 1)

    @property
    def before(self) -> int:
        """Tokens until the last level is halved for the first time."""
        return self.block << (self.levels - 1)


def raised(shape: Shape, middle: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """r, once `middle` tokens came: a token of level 0 stands for 2^r."""
    return np.uint32(32) - jax.lax.clz(middle // np.uint32(shape.before))


def fills(shape: Shape, middle: UInt32[Array, "..."]) -> Int32[Array, "... L"]:
    """How many slots of each level are taken; of level 0, how many groups have begun."""
    half = np.uint32(shape.half)
    r, begun = _first_group(shape, middle)
    batches = (middle >> r) // np.uint32(shape.block)
    levels = range(1, shape.levels)
    last = shape.levels - 1
    inner = [(batches >> np.uint32(level - 1)) & np.uint32(1) for level in levels if level < last]
    top = [jnp.minimum(batches >> np.uint32(last - 1), np.uint32(1))] if last else []
    first = (middle - begun + (np.uint32(1) << r) - np.uint32(1)) >> r
    return jnp.stack([first, *(half * x for x in [*inner, *top])], axis=-1).astype(jnp.int32)


def _first_group(shape: Shape, middle: UInt32[Array, "..."]) -> tuple[Array, Array]:
    """r, and the number of the token with which level 0 began."""
    r = raised(shape, middle)
    begun = middle & ~((np.uint32(shape.block) << r) - np.uint32(1))
    return r, begun if shape.levels > 1 else jnp.zeros_like(begun)


def tokens_until_full(shape: Shape, middle: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """How many tokens come until level 0 is full."""
    r, begun = _first_group(shape, middle)
    return begun + (np.uint32(shape.block) << r) - middle


def chosen_of(
    shape: Shape, middle: UInt32[Array, "B T"], key: UInt32[Array, "B K 2"]
) -> UInt32[Array, "B K T t"]:
    """The number of the token that each slot of level 0 holds or will hold."""
    r, begun = (x[:, None, :, None] for x in _first_group(shape, middle))
    first = begun + (jnp.arange(shape.block, dtype=jnp.uint32)[None, None, None] << r)
    flat = draws(first.reshape(len(middle), 1, -1), key)
    bits = flat.reshape(*key.shape[:2], *first.shape[2:])
    # The group's highest r bits of a draw; two shifts, for one by 32 is not defined.
    return first + ((bits >> np.uint32(1)) >> (np.uint32(31) - r))


def held(
    shape: Shape, middle: UInt32[Array, "B T"], key: UInt32[Array, "B K 2"]
) -> Bool[Array, "B K T S"]:
    """Which slots hold a token, level 0 first."""
    full = jnp.repeat(fills(shape, middle)[..., 1:] > 0, shape.half, axis=2)[:, None]
    full = jnp.broadcast_to(full, (*key.shape[:2], *full.shape[2:]))
    first = chosen_of(shape, middle, key) < middle[:, None, :, None]
    return jnp.concatenate([first, full], axis=3)


def log_weights(shape: Shape, middle: UInt32[Array, "..."]) -> Float32[Array, "... S"]:
    """The log of what each slot's token stands for."""
    level = np.maximum(np.arange(shape.slots) // shape.half - 1, 0).astype(np.int32)
    r = raised(shape, middle)[..., None].astype(jnp.int32)
    times = r + level.reshape(*[1] * middle.ndim, -1)
    return times.astype(jnp.float32) * np.float32(np.log(2))


def before_half(shape: Shape, middle: UInt32[Array, "..."]) -> Int32[Array, "... P"]:
    """How many tokens stand before each half's in the order of the text: the last level has the
    oldest. A group that has begun counts, whether its token has come or not."""
    full = fills(shape, middle)
    before = jnp.cumsum(full[..., ::-1], axis=-1)[..., ::-1] - full
    first = before[..., :1]
    return jnp.concatenate([first, first + shape.half, before[..., 1:]], axis=-1)


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
    """The levels, and how many tokens came to them, once all came that leave the window."""
    one = leaving.tokens.positions.shape[2] == 1
    return (_absorb_one if one else _absorb)(by, sample, middle, key, leaving)


def _absorb_one(
    by: Reducer, sample: Sample, middle: Array, key: Array, leaving: Leaving
) -> tuple[Sample, Array]:
    shape, token, there = by.shape, leaving.tokens, leaving.there[:, 0]
    r, begun = _first_group(shape, middle)
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
    r, _ = _first_group(shape, middle)
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
    chances = uniforms(after[:, None, None] * _ODD + number[None, None], key)
    chosen = by.halve(keys, both.v, chances)
    half = pick(both, chosen)
    if by.local:
        slot = jax.lax.broadcasted_iota(jnp.uint32, chosen.shape, 2)
        was = chosen.astype(jnp.uint32) % np.uint32(size)
        half = half._replace(k=move(by.spec, half.k, slot - was))
    return half
