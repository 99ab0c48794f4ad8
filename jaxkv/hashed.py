"""A prompt that is hashed once, when it is complete: the state behind MagicPIG (2410.16179).

Every token is kept. Until `seal` attention is exact. Then each kv head centres the keys between
the first tokens and the last by their mean, hashes them, and has tables of them. What comes later
is hashed as it comes and waits in a zone, where it is met by comparing codes, until `reserve` makes
room for more and new tables of all. A query sees the first tokens and the newest exactly, and of
those between the ones whose codes agree with its own often enough.

What is in the tables is never written between two calls of `reserve`, so it may lie in the memory
of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import buckets, exact, lsh, slots
from jaxkv import sample as drawn
from jaxkv.buckets import Drawn, Tables
from jaxkv.contract import Chunk, Kept, Spec
from jaxkv.errors import UserError
from jaxkv.lsh import Hashing
from jaxkv.pallas_kernels import host
from jaxkv.pallas_kernels.sampled_attention import Angles
from jaxkv.slots import OVERFULL, Slots
from jaxkv.typing import Array, Bool, Float, Float32, Int32, Integer, UInt32

MOST = 2**30  # slots
_STRIDE = 8192  # tokens for which room is made at the most, unless more are asked for
_HASHED = 2048  # keys at a time
_TILE = 8  # a TPU kernel takes caches of whole tiles of so many slots


class Hashed(NamedTuple):
    """exact: until the prompt is sealed every token; then the first ones, and all that are not in
    the tables, the newest last. Without slots until then:

    far: what is in the tables. center: what keys are centred by, which is no number where a key is
    none, for such a key has no code by which it would be met. norms: of the keys in `far`, so
    centred. planes, tables: lsh.py, buckets.py. zone: codes of what is in `exact` behind the first
    tokens, Z places for the window and as many as there is room for since `seal`; waiting: norms of
    those keys. sealed: no bytes; X is 0 until the prompt is sealed and then the slots that `far`
    had first, for `reserve` is told of the tokens behind the prompt alone.
    """

    exact: Slots
    far: Slots
    center: Float32[Array, "B K H"]
    norms: Float32[Array, "B K P"]
    planes: Float32[Array, "B K H F"]
    tables: Tables
    zone: Integer[Array, "B K L Z"]
    waiting: Float32[Array, "B K Y"]
    sealed: Int32[Array, "B X 0"]
    key: UInt32[Array, "B K 2"]


AXES = Hashed(
    slots.AXES, slots.AXES, ("B", "K", "H"), ("B", "K", "P"), ("B", "K", "H", "F"), buckets.AXES,
    ("B", "K", "L", "Z"), ("B", "K", "Y"), ("B", "X", "0"), ("B", "K", "2"),
)  # fmt: skip
ON_HOST = ("far.k", "far.v", "tables")
SHARED = tuple(f"{part}.{name}" for part in ("exact", "far") for name in slots.SHARED)
APPENDS = tuple(f"exact.{name}" for name in slots.APPENDS)


class Indexing(NamedTuple):
    """What a policy says of it. generated: whether what comes behind the prompt is hashed too.
    zone: for how many tokens behind the prompt there is room at the least. on_host: where `far` and
    the tables lie."""

    how: Hashing
    sinks: int
    window: int
    center: bool
    generated: bool
    zone: int
    on_host: bool


def init(spec: Spec, rows: int, key: jax.Array, start: int) -> Hashed:
    """No tokens yet, and so many slots."""
    heads = rows, spec.kv_heads
    none = jnp.zeros((*heads, 0), jnp.float32)
    return Hashed(
        slots.init(spec, rows, start),
        slots.init(spec, rows, 0),
        jnp.zeros((*heads, spec.head_dim), jnp.float32),
        none,
        jnp.zeros((*heads, spec.head_dim, 0), jnp.float32),
        buckets.init(*heads),
        jnp.zeros((*heads, 0, 0), jnp.uint16),
        none,
        jnp.zeros((rows, 0, 0), jnp.int32),
        drawn.keys(key, spec, rows),
    )


def is_sealed(state: Hashed) -> bool:
    """Whether the prompt is complete."""
    return state.sealed.shape[1] > 0


def seal(state: Hashed, by: Indexing) -> Hashed:
    """The prompt is complete: planes are drawn, the mean is taken, tables are made.

    Raises UserError for one that is sealed already: its tables would be lost.
    """
    if is_sealed(state):
        raise UserError("a prompt is sealed once, and this one is; seal a state that is not")
    ends = by.sinks + by.window
    size = max(ends + 1, state.exact.positions.shape[1])
    prompt = slots.grow(state.exact, size)
    rows, kv_heads, _, head_dim = prompt.k.shape
    between = jnp.clip(prompt.count - ends, 0, size - ends)
    far = Slots(*(_slots(leaf, by.sinks, size - by.window) for leaf in prompt[:3]), between)
    far = slots.grow(far, _whole(size - ends))
    # A row with nothing between has the mean of what it has.
    first = jnp.where(between > 0, np.int32(by.sinks), np.int32(0))[:, None]
    last = jnp.where(between > 0, by.sinks + between, prompt.count)[:, None]
    slot = jnp.arange(size)[None]
    center = _mean(prompt.k, (slot >= first) & (slot < last))
    if not by.center:
        center = jnp.where(jnp.isnan(center), center, 0)
    state = state._replace(center=center)
    planes = jax.lax.map(
        lambda key: lsh.planes(key[None, None], head_dim, by.how)[0, 0],
        state.key.reshape(-1, 2),
    )
    state = state._replace(
        exact=_without(prompt, by, between, _whole(ends + by.zone)),
        far=far,
        planes=planes.reshape(rows, kv_heads, head_dim, -1),
        sealed=jnp.zeros((rows, far.positions.shape[1], 0), jnp.int32),
    )
    return _index(state, by)


def reserve(spec: Spec, state: Hashed, tokens: int, by: Indexing) -> Hashed:
    """Room for `tokens`, or once the prompt is sealed for so many behind it.

    Where there is no room new tables are made of all that is between, and the zone is empty again.
    """
    if not is_sealed(state):
        return state._replace(exact=exact.reserve(state.exact, tokens, MOST))
    ends = by.sinks + by.window
    room = state.exact.positions.shape[1] - ends
    if tokens <= room:
        return state
    more = max(tokens - room, by.zone, min(room, _STRIDE))
    prompt = state.sealed.shape[1]
    if ends + prompt + room + more > MOST:
        raise UserError(
            f"a prompt and what follows it are at most {MOST} tokens, and "
            f"{ends + prompt + room + more} are needed; use a policy with a fixed memory such as "
            "streaming:sinks=4,window=252"
        )
    size = _whole(ends + room + more)
    if not by.generated:
        return state._replace(
            exact=slots.grow(state.exact, size), zone=_zone(state.zone, size - by.sinks)
        )
    return _move(state, by, size, _whole(prompt + room))


@partial(jax.jit, static_argnames=("by", "size", "places"))
def _move(state: Hashed, by: Indexing, size: int, places: int) -> Hashed:
    """What has left the window goes from `exact`, of `size` slots then, to `far`, of `places`."""
    state = _to(host.to_device, state) if by.on_host else state
    held, far = state.exact, slots.grow(state.far, places)
    most = held.positions.shape[1] - by.sinks - by.window
    leaving = jnp.clip(held.count - by.sinks - by.window, 0, most)
    zone = Slots(*(_slots(leaf, by.sinks, by.sinks + most) for leaf in held[:3]), leaving)
    place = jnp.arange(places)[None] - far.count[:, None]
    comes = (place >= 0) & (place < leaving[:, None])
    source = jnp.clip(place, 0, most - 1)

    def join(old: Array, new: Array) -> Array:
        here, there = (comes, source) if old.ndim == 2 else (
            comes[:, None, :, None], source[:, None, :, None]
        )  # fmt: skip
        return jnp.where(here, jnp.take_along_axis(new, there, axis=old.ndim // 2), old)

    far = Slots(*map(join, far[:3], zone[:3]), far.count + leaving)
    return _index(state._replace(exact=_without(held, by, leaving, size), far=far), by)


def _whole(size: int) -> int:
    return -(-size // _TILE) * _TILE


def _slots(leaf: Array, first: int, end: int) -> Array:
    return leaf[:, first:end] if leaf.ndim == 2 else leaf[:, :, first:end]


def _without(held: Slots, by: Indexing, gone: Int32[Array, " B"], size: int) -> Slots:
    """The first tokens, and those behind the next `gone`, in slots of another number."""
    ends = by.sinks + by.window
    slot = jnp.arange(ends)[None]
    source = jnp.where(slot < by.sinks, slot, slot + gone[:, None])
    source = jnp.minimum(source, held.positions.shape[1] - 1)
    left = Slots(
        *(jnp.take_along_axis(leaf, source[:, None, :, None], axis=2) for leaf in held[:2]),
        jnp.take_along_axis(held.positions, source, axis=1),
        # A row that lost tokens says so ever after.
        jnp.where(held.count > held.positions.shape[1], OVERFULL, held.count - gone),
    )
    return slots.grow(left, size)


def _zone(zone: Integer[Array, "B K L Z"], size: int) -> Integer[Array, "B K L Z"]:
    return jnp.pad(zone, ((0, 0), (0, 0), (0, 0), (0, size - zone.shape[3])))


def _mean(k: Float[Array, "B K S H"], of: Bool[Array, "B S"]) -> Float32[Array, "B K H"]:
    of = of.astype(jnp.float32)
    share = of / jnp.maximum(1, jnp.sum(of, axis=1, keepdims=True))
    return jnp.einsum("bs,bksh->bkh", share, k.astype(jnp.float32), precision="highest")


def _index(state: Hashed, by: Indexing) -> Hashed:
    """Tables of `far`, and a zone of what `exact` holds behind the first tokens: the newest."""
    rows, kv_heads = state.exact.k.shape[:2]
    size, places = state.exact.positions.shape[1], state.far.positions.shape[1]
    there = jnp.arange(places)[None] < state.far.count[:, None]

    def one(head: Array) -> tuple:
        def pick(leaf: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(leaf.reshape(-1, *leaf.shape[2:]), head, 0, False)

        planes, center = pick(state.planes), pick(state.center)[None]
        far = pick(state.far.k).astype(jnp.float32) - center
        tables = buckets.build(_codes(far, planes, by.how), there[head // kv_heads], by.how.bits)
        if not by.generated:
            none = jnp.zeros((0, size - by.sinks), jnp.uint16)
            return tables, _norm(far), none, jnp.zeros(0, jnp.float32)
        held = pick(state.exact.k).astype(jnp.float32) - center
        newest = held[by.sinks : by.sinks + by.window]
        codes = _codes(newest, planes, by.how).astype(jnp.uint16)
        codes = jnp.pad(codes, ((0, 0), (0, size - by.sinks - by.window)))
        return tables, _norm(far), codes, _norm(held)

    found = jax.lax.map(one, jnp.arange(rows * kv_heads))
    split = lambda a: a.reshape(rows, kv_heads, *a.shape[1:])  # noqa: E731
    tables, norms, zone, waiting = jax.tree.map(split, found)
    state = state._replace(tables=tables, norms=norms, zone=zone, waiting=waiting)
    return _to(host.to_host, state) if by.on_host else state


def _to(where: Callable[[Array], Array], state: Hashed) -> Hashed:
    """What `reserve` alone writes, in the memory of the host or the device."""
    k, v = map(where, state.far[:2])
    return state._replace(
        far=state.far._replace(k=k, v=v), tables=jax.tree.map(where, state.tables)
    )


def _norm(keys: Float32[Array, "... H"]) -> Float32[Array, "..."]:
    return jnp.sqrt(jnp.sum(keys * keys, axis=-1))


def _codes(
    keys: Float32[Array, "S H"], planes: Float32[Array, "H F"], how: Hashing
) -> Int32[Array, "L S"]:
    """The codes of many keys, some at a time: their products with all planes would be large."""
    count = keys.shape[0]
    if count <= _HASHED:
        return lsh.codes(keys[None], planes[None], how)[0]
    some = jnp.pad(keys, ((0, -count % _HASHED), (0, 0))).reshape(-1, _HASHED, keys.shape[1])
    codes = jax.lax.map(lambda keys: lsh.codes(keys[None], planes[None], how)[0], some)
    return jnp.moveaxis(codes, 0, 1).reshape(how.tables, -1)[:, :count]


def extend(spec: Spec, state: Hashed, chunk: Chunk, by: Indexing) -> Hashed:
    """Absorb a chunk; once the prompt is sealed its codes go into the zone."""
    after = state._replace(exact=exact.extend(spec, state.exact, chunk))
    if not is_sealed(state) or not by.generated:
        return after
    rows, tokens, kv_heads, head_dim = chunk.k.shape
    numbers = slots.number(state.exact, chunk.valid)
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    # As they are stored: in half precision the tables' keys are what was rounded.
    keys = keys.astype(state.exact.k.dtype).astype(jnp.float32) - state.center[:, :, None]
    lost = jnp.any(jnp.isnan(keys) & chunk.valid[:, None, :, None], axis=2)
    flat = keys.reshape(rows * kv_heads, tokens, head_dim)
    planes = state.planes.reshape(rows * kv_heads, head_dim, -1)
    codes = lsh.codes(flat, planes, by.how).reshape(rows, kv_heads, -1, tokens)
    return after._replace(
        center=jnp.where(lost, np.float32(np.nan), state.center),
        waiting=_write(state.waiting, _norm(keys), numbers),
        zone=_write(state.zone, codes.astype(jnp.uint16), numbers - by.sinks),
    )


def _write(old: Array, new: Array, at: Int32[Array, "B T"]) -> Array:
    """old [B,...,S] with new [B,...,T] at these places of its last axis; below 0: nowhere."""
    axis, size = old.ndim - 2, old.shape[-1]

    def one_token(old: Array, new: Array, at: Array) -> Array:
        held = jax.lax.dynamic_slice_in_dim(old, at[0], 1, axis)
        there = (at[0] >= 0) & (at[0] < size)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(there, new, held), at[0], axis)

    def many(old: Array, new: Array, at: Array) -> Array:
        return old.at[..., jnp.where(at < 0, size, at)].set(new, mode="drop")

    one = one_token if at.shape[1] == 1 else many
    if old.shape[0] == 1:  # without an axis of rows XLA writes in place
        return one(old[0], new[0], at[0])[None]
    return jax.vmap(one)(old, new, at)


def number(state: Hashed, valid: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Each token's number in its row, from 0; -1 for padding."""
    own = slots.number(state.exact, valid)
    return jnp.where(valid, own + state.far.count[:, None], own)


def slot_of(state: Hashed, numbers: Int32[Array, "B ..."]) -> Int32[Array, "B ..."]:
    """Where a token behind those of the tables stands in `exact`; padding's -1 stays below 0."""
    far = state.far.count.reshape(-1, *[1] * (numbers.ndim - 1))
    return jnp.where(numbers < 0, numbers, numbers - far)


def find(
    state: Hashed,
    by: Indexing,
    budget: int,
    q: Float[Array, "B N H"],
    numbers: Int32[Array, " B"],
    positions: UInt32[Array, " B"],
) -> Drawn:
    """The places that one query a head, already turned, agrees with often enough: at most `budget`,
    of more than that a systematic sample.

    Places are those of `far`, and behind them those of the zone. numbers: of the query's token.
    positions: what its draw follows from.
    """
    own = slot_of(state, numbers)
    rows, heads, head_dim = q.shape
    kv_heads, waits = state.zone.shape[1], state.zone.shape[3] if by.generated else 0
    places = state.far.positions.shape[1]
    group, most = heads // kv_heads, min(budget, places + waits)
    codes = lsh.codes(
        q.reshape(rows * kv_heads, group, head_dim),
        state.planes.reshape(rows * kv_heads, head_dim, -1),
        by.how,
    )
    codes = codes.transpose(0, 2, 1).reshape(rows * heads, -1)
    nth = jnp.arange(group, dtype=jnp.uint32)[None, None]
    nth = positions[:, None, None] * np.uint32(group) + nth
    draws = drawn.uniforms(nth * drawn.GOLDEN, state.key)  # far from the draws of the planes

    def one(head: Array, code: Array, draw: Array) -> Drawn:
        of = head // group
        met = buckets.tally(state.tables, of, code, places, by.how.least)
        if not by.generated:
            return buckets.select(met, most, draw)
        last = own[head // heads] - by.window - by.sinks
        waiting = buckets.compare(state.zone, of, code, last, by.how.least)
        found = buckets.select(jnp.concatenate([met, waiting]), most, draw)
        # Words are whole, so there may be bits of no place behind those of the tables.
        whole = met.shape[0] * buckets.WORD
        rows = found.rows - jnp.where(found.rows >= whole, whole - places, 0)
        return found._replace(rows=rows)

    every = jnp.arange(rows * heads, dtype=jnp.int32), codes, draws.reshape(-1)
    found = jax.lax.map(lambda given: one(*given), every)
    return jax.tree.map(lambda a: a.reshape(rows, heads, *a.shape[1:]), found)


def angles(state: Hashed, norms: Float32[Array, "B K S"], q: Float[Array, "B N H"]) -> Angles:
    """What makes a cosine of the product of a query with a key that is stored as it came."""
    rows, heads, head_dim = q.shape
    q = q.astype(jnp.float32)
    grouped = q.reshape(rows, state.center.shape[1], -1, head_dim)
    shift = jnp.einsum("bkgh,bkh->bkg", grouped, state.center, precision="highest")
    return Angles(norms, shift.reshape(rows, heads), _norm(q))


def is_lost(state: Hashed) -> Bool[Array, "B K"]:
    """Where a key that is hashed is no number."""
    return jnp.any(jnp.isnan(state.center), axis=2)


def kept(state: Hashed) -> Kept:
    """What `exact` holds, and behind it what is in the tables."""
    held, far = slots.kept(state.exact), slots.kept(state.far)
    return Kept(
        jnp.concatenate([held.positions, far.positions], axis=2),
        jnp.concatenate([held.log_weight, far.log_weight], axis=2),
    )
