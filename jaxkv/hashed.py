"""A prompt that is hashed once, when it is complete: the state behind MagicPIG (2410.16179).

Every token is kept. Until `seal` attention is exact. Then each kv head centres the keys between
the first tokens and the last by their mean, hashes them, and has tables of them; what comes later
is hashed as it comes and waits in a zone, where it is met by comparing codes, until `reserve` makes
room for more and new tables of all. A query sees the first tokens and the newest exactly, and
of those between the ones whose codes agree with its own often enough.

A token is known by its number in the row, which is its slot; a place is a number less the sinks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import buckets, exact, lsh, slots
from jaxkv import sample as drawn
from jaxkv.attention import scores
from jaxkv.buckets import Drawn, Tables
from jaxkv.contract import Chunk, Kept, Spec
from jaxkv.errors import UserError
from jaxkv.lsh import Hashing
from jaxkv.slots import Slots
from jaxkv.typing import Array, Bool, Float, Float32, Int32, Integer, UInt32
from pallas_kernels.sampled_attention import Angles

MOST = 2**30  # slots
_STRIDE = 8192  # tokens for which room is made at the most, unless more are asked for
_HASHED = 2048  # keys at a time
_COMPARED = 512  # codes of the zone at a time


class Hashed(NamedTuple):
    """exact: every token. Of what lies between, empty until the prompt is sealed:

    indexed: how many are in the tables. center: what keys are centred by. norms: of keys so
    centred. planes, tables: lsh.py, buckets.py. zone: codes of those behind, the newest included;
    Z = window and as many as there is room for since `seal`.
    """

    exact: Slots
    indexed: Int32[Array, " B"]
    center: Float32[Array, "B K H"]
    norms: Float32[Array, "B K Y"]
    planes: Float32[Array, "B K H F"]
    tables: Tables
    zone: Integer[Array, "B K L Z"]
    key: UInt32[Array, "B K 2"]


AXES = Hashed(
    slots.AXES, ("B",), ("B", "K", "H"), ("B", "K", "Y"), ("B", "K", "H", "F"), buckets.AXES,
    ("B", "K", "L", "Z"), ("B", "K", "2"),
)  # fmt: skip
SHARED = (*(f"exact.{name}" for name in slots.SHARED), "indexed")


class Indexing(NamedTuple):
    """What a policy says of it. generated: whether what comes behind the prompt is hashed too.
    zone: for how many tokens behind the prompt there is room at the least."""

    how: Hashing
    sinks: int
    window: int
    center: bool
    generated: bool
    zone: int


def init(spec: Spec, rows: int, key: jax.Array, start: int) -> Hashed:
    heads = rows, spec.kv_heads
    return Hashed(
        slots.init(spec, rows, start),
        jnp.zeros((rows,), jnp.int32),
        jnp.zeros((*heads, spec.head_dim), jnp.float32),
        jnp.zeros((*heads, 0), jnp.float32),
        jnp.zeros((*heads, spec.head_dim, 0), jnp.float32),
        buckets.init(*heads),
        jnp.zeros((*heads, 0, 0), jnp.uint16),
        drawn.keys(key, spec, rows),
    )


def is_sealed(state: Hashed) -> bool:
    return state.zone.shape[3] > 0


def seal(state: Hashed, by: Indexing) -> Hashed:
    """The prompt is complete: planes are drawn, the mean is taken, tables are made."""
    least = by.sinks + by.window + 1  # slots
    size = max(least, state.exact.positions.shape[1])
    state = state._replace(exact=slots.grow(state.exact, size + by.zone))
    rows, kv_heads, size, head_dim = state.exact.k.shape
    there = between(state, by, size)
    if by.center:
        # A row with nothing between has the mean of what it has.
        held = jnp.arange(size)[None] < state.exact.count[:, None]
        of = jnp.where(jnp.any(there, axis=1, keepdims=True), there, held)
        state = state._replace(center=_mean(state.exact.k, of))
    planes = jax.lax.map(
        lambda key: lsh.planes(key[None, None], head_dim, by.how)[0, 0],
        state.key.reshape(-1, 2),
    )
    state = state._replace(planes=planes.reshape(rows, kv_heads, head_dim, -1))
    return _index(state, by, by.window + by.zone, size - by.zone - by.sinks - by.window)


def reserve(spec: Spec, state: Hashed, tokens: int, by: Indexing) -> Hashed:
    """Room for `tokens`, or once the prompt is sealed for so many behind it.

    Where there is no room new tables are made of all that is between, and the zone is empty again.
    """
    if not is_sealed(state):
        return state._replace(exact=exact.reserve(state.exact, tokens, MOST))
    room = state.zone.shape[3] - by.window
    if tokens <= room:
        return state
    more = max(tokens - room, by.zone, min(room, _STRIDE))
    before = state.exact.positions.shape[1]
    if before + more > MOST:
        raise UserError(
            f"a prompt and what follows it are at most {MOST} tokens, and {before + more} slots "
            "are needed; use a policy with a fixed memory such as streaming:sinks=4,window=252"
        )
    zone = by.window + room + more
    state = state._replace(exact=slots.grow(state.exact, before + more))
    if by.generated:
        return _index(state, by, zone, before - by.sinks - by.window)
    longer = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)])  # noqa: E731
    return state._replace(norms=longer(state.norms), zone=longer(state.zone))


def between(state: Hashed, by: Indexing, size: int) -> Bool[Array, "B S"]:
    """The slots of tokens that are neither among the first nor among the newest."""
    slot, count = jnp.arange(size)[None], state.exact.count[:, None]
    return (slot >= by.sinks) & (slot < count - by.window)


def _mean(k: Float[Array, "B K S H"], of: Bool[Array, "B S"]) -> Float32[Array, "B K H"]:
    of = of.astype(jnp.float32)
    share = of / jnp.maximum(1, jnp.sum(of, axis=1, keepdims=True))
    return jnp.einsum("bs,bksh->bkh", share, k.astype(jnp.float32), precision="highest")


@partial(jax.jit, static_argnames=("by", "zone", "places"))
def _index(state: Hashed, by: Indexing, zone: int, places: int) -> Hashed:
    """Tables of what is between, which is at so many places at the most, and a zone of this size
    that holds the newest."""
    rows, kv_heads = state.exact.k.shape[:2]
    there = between(state, by, by.sinks + places)[:, by.sinks :]
    indexed = jnp.sum(there, axis=1, dtype=jnp.int32)

    def one(head: Array) -> tuple:
        row = head // kv_heads

        def pick(leaf: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(leaf.reshape(-1, *leaf.shape[2:]), head, 0, False)

        keys = pick(state.exact.k).astype(jnp.float32) - pick(state.center)[None]
        planes = pick(state.planes)
        codes = _codes(keys[by.sinks : by.sinks + places], planes, by.how)
        tables = buckets.build(codes, there[row], by.how.bits)
        if not by.generated:
            return tables, jnp.zeros((0, zone), jnp.uint16), _norm(keys)
        # What follows the tables, as far as the window goes.
        begin = by.sinks + indexed[row]
        newest = jax.lax.dynamic_slice_in_dim(keys, begin, by.window, 0)
        waiting = _codes(newest, planes, by.how).astype(jnp.uint16)
        return tables, jnp.pad(waiting, ((0, 0), (0, zone - by.window))), _norm(keys)

    found = jax.lax.map(one, jnp.arange(rows * kv_heads))
    split = lambda a: a.reshape(rows, kv_heads, *a.shape[1:])  # noqa: E731
    tables, waiting, norms = jax.tree.map(split, found)
    return state._replace(indexed=indexed, norms=norms, tables=tables, zone=waiting)


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
    flat = keys.reshape(rows * kv_heads, tokens, head_dim)
    planes = state.planes.reshape(rows * kv_heads, head_dim, -1)
    codes = lsh.codes(flat, planes, by.how).reshape(rows, kv_heads, -1, tokens)
    waits = numbers - by.sinks - state.indexed[:, None]
    return after._replace(
        norms=_write(state.norms, _norm(keys), numbers),
        zone=_write(state.zone, codes.astype(jnp.uint16), waits),
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


def find(
    state: Hashed,
    by: Indexing,
    budget: int,
    q: Float[Array, "B N H"],
    numbers: Int32[Array, " B"],
    positions: UInt32[Array, " B"],
) -> Drawn:
    """The slots that one query a head, already turned, agrees with often enough: at most `budget`,
    of more than that a systematic sample.

    numbers: the query's token. positions: what its draw follows from.
    """
    rows, heads, head_dim = q.shape
    kv_heads, size = state.zone.shape[1], state.exact.positions.shape[1]
    group, most = heads // kv_heads, min(budget, size)
    codes = lsh.codes(
        q.reshape(rows * kv_heads, group, head_dim),
        state.planes.reshape(rows * kv_heads, head_dim, -1),
        by.how,
    )
    codes = codes.transpose(0, 2, 1).reshape(rows * heads, -1)
    nth = jnp.arange(group, dtype=jnp.uint32)[None, None]
    nth = positions[:, None, None] * np.uint32(group) + nth
    draws = drawn.uniforms(nth * np.uint32(0x9E3779B1), state.key)  # far from those of the planes

    def one(head: Array, code: Array, draw: Array) -> Drawn:
        of, row = head // group, head // heads
        met = buckets.tally(state.tables, of, code, 1 + size + _COMPARED)
        if by.generated:
            last = numbers[row] - by.window - by.sinks - state.indexed[row]
            met = _compare(state.zone, of, code, state.indexed[row], last, met)
        found = buckets.select(met >= np.asarray(by.how.least, met.dtype), most, draw)
        slot = jnp.clip(found.rows - 1 + by.sinks, 0, size - 1)
        return found._replace(rows=slot)

    every = jnp.arange(rows * heads, dtype=jnp.int32), codes, draws.reshape(-1)
    found = jax.lax.map(lambda given: one(*given), every)
    return jax.tree.map(lambda a: a.reshape(rows, heads, *a.shape[1:]), found)


def _compare(
    zone: Integer[Array, "B K L Z"], of: Array, code: Int32[Array, " L"], indexed: Array,
    last: Array, met: Integer[Array, " S"],
) -> Integer[Array, " S"]:  # fmt: skip
    """The tally with those tokens of the zone, up to the `last`, that have codes in common."""
    zone = zone.reshape(-1, *zone.shape[2:])
    tables, size = zone.shape[1:]
    width = min(_COMPARED, size)

    def some(i: Array, met: Array) -> Array:
        begin = jnp.minimum(i * width, size - width)
        held = jax.lax.dynamic_slice(zone, (of, 0, begin), (1, tables, width))[0]
        same = jnp.sum(held == code.astype(held.dtype)[:, None], axis=0, dtype=met.dtype)
        same = jnp.where(begin + jnp.arange(width) <= last, same, 0)
        return jax.lax.dynamic_update_slice(met, same, (1 + indexed + begin,))

    return jax.lax.fori_loop(0, (last + width) // width, some, met)


def angles(state: Hashed, q: Float[Array, "B N H"]) -> Angles:
    """What makes a cosine of the product of a query with a key that is stored as it came."""
    rows, heads, head_dim = q.shape
    q = q.astype(jnp.float32)
    grouped = q.reshape(rows, state.center.shape[1], -1, head_dim)
    shift = jnp.einsum("bkgh,bkh->bkg", grouped, state.center, precision="highest")
    return Angles(state.norms, shift.reshape(rows, heads), _norm(q))


def log_weights(state: Hashed, q: Float[Array, "B N H"], of: Angles, how: Hashing) -> Array:
    """The log weights [B,N,S] of all keys, were they drawn."""
    dot = scores(q[:, None], state.exact.k, 1.0)[:, :, :, 0]  # [B,K,G,S]
    dot = dot.reshape(*q.shape[:2], -1) - of.shift[:, :, None]
    norms = jnp.repeat(of.norms, q.shape[1] // of.norms.shape[1], axis=1)
    size = of.length[:, :, None] * norms
    return how(jax.lax.stop_gradient(jnp.where(size > 0, dot / jnp.where(size > 0, size, 1), 0)))


def kept(state: Hashed) -> Kept:
    return slots.kept(state.exact)
