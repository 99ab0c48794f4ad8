"""The LSH index of MagicPIG (2410.16179): hash tables of a prompt, and an unindexed tail.

Every token is cached. Until the end of prefill attention is exact. `finish_prefill` then centres
the keys between the first and the last tokens of each KV head by their mean, hashes them, and
builds tables. A generated token is hashed when it comes and joins the unindexed tail, whose codes
are compared one by one. When the tail is full, `reserve` makes room and builds new tables of all
keys. A query sees the first and the newest tokens exactly, and of the others the keys whose
codes agree with its own often enough.

Between two calls of `reserve` the indexed keys and the tables are only read, so they may live in
host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import (
    Cached,
    Chunk,
    Leaf,
    Spec,
    State,
    check_prefill_unfinished,
    prefill_finished,
)
from jaxkv.defaults import POLICY
from jaxkv.errors import UserError
from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels.sampled_attention import Angles
from jaxkv.platform import cpu as xla_cpu
from jaxkv.policies.magicpig import hash_tables, lsh
from jaxkv.policies.magicpig.hash_tables import Tables
from jaxkv.policies.magicpig.lsh import Hashing
from jaxkv.typing import Array, Bool, Float, Float32, Int32, Integer, UInt32

_MAX_STEP = 8192  # tokens for which room is made at a time, unless more are asked for
_HASHED = 2048  # keys hashed at a time
_TILE = 8  # a TPU kernel takes caches of whole tiles of this many slots


class IndexState(NamedTuple):
    """dense: during prefill every token; then the first tokens, and those not indexed, in order.

    The other arrays have no slots before the end of prefill.
    indexed: the tokens in the tables.
    center: the mean key, subtracted before hashing; NaN if any key is NaN, since such a key has no
      code.
    norms: norms of the centred keys of `indexed`.
    planes, tables: see lsh.py and hash_tables.py.
    tail_codes: codes of the tokens in `dense` after the sinks, Z places.
    tail_norms: norms of their centred keys.
    finished: no bytes; X is 0 during prefill and then the slots that `indexed` had first, because
      `reserve` sees only shapes and counts tokens since prefill.
    rng: seeds of the draws.
    """

    dense: Ring
    indexed: Ring
    center: Float32[Array, "B K H"]
    norms: Float32[Array, "B K P"]
    planes: Float32[Array, "B K H R"]
    tables: Tables
    tail_codes: Integer[Array, "B K L Z"]
    tail_norms: Float32[Array, "B K Y"]
    finished: Int32[Array, "B X 0"]
    rng: UInt32[Array, "B K 2"]

    @property
    def prompt_slots(self) -> int:
        return self.finished.shape[1]


class IndexSettings(NamedTuple):
    """The settings of an index.

    hash_generated: whether generated tokens are hashed too. tail: generated tokens for which there
    is room at least. host_offload: the indexed tokens and the tables live in host memory.
    """

    hashing: Hashing
    sinks: int
    window: int
    center: bool
    hash_generated: bool
    tail: int
    host_offload: bool

    @property
    def ends(self) -> int:
        return self.sinks + self.window


def leaves(host_offload: bool) -> IndexState:
    offloadable: State = (*ring.LEAVES[:2], hash_tables.LEAVES)
    if host_offload:
        on_host = partial(dataclasses.replace, location="host")
        offloadable = jax.tree.map(on_host, offloadable)
    k, v, tables = offloadable
    return IndexState(
        dense=ring.DENSE_LEAVES,
        indexed=ring.LEAVES._replace(k=k, v=v),
        center=Leaf("B K H"),
        norms=Leaf("B K P"),
        planes=Leaf("B K H R"),
        tables=tables,
        tail_codes=Leaf("B K L Z"),
        tail_norms=Leaf("B K Y"),
        finished=Leaf("B X 0"),
        rng=Leaf("B K 2"),
    )


def nbytes(spec: Spec, start: int, tokens: int) -> int:
    """Bytes of one sequence before the end of prefill, with room for `tokens`."""
    slots = rows.slots_for(tokens, start)
    heads = spec.kv_heads
    return ring.nbytes(spec, slots) + ring.nbytes(spec, 0) + 4 * heads * spec.head_dim + 8 * heads


def init(spec: Spec, batch: int, rng: jax.Array, start: int) -> IndexState:
    """An empty state with `start` slots."""
    heads = batch, spec.kv_heads
    return IndexState(
        dense=ring.init(spec, batch, start),
        indexed=ring.init(spec, batch, 0),
        center=jnp.zeros((*heads, spec.head_dim), jnp.float32),
        norms=jnp.zeros((*heads, 0), jnp.float32),
        planes=jnp.zeros((*heads, spec.head_dim, 0), jnp.float32),
        tables=hash_tables.init(*heads),
        tail_codes=jnp.zeros((*heads, 0, 0), jnp.uint16),
        tail_norms=jnp.zeros((*heads, 0), jnp.float32),
        finished=jnp.zeros((batch, 0, 0), jnp.int32),
        rng=draws.seeds(rng, spec, batch),
    )


def finish_prefill(state: IndexState, settings: IndexSettings) -> IndexState:
    """Draw planes, compute the mean key and build the tables of the prompt.

    Raises UserError for a state whose prefill is finished: its tables would be lost.
    """
    check_prefill_unfinished(state)
    ends = settings.ends
    size = max(ends + 1, state.dense.positions.shape[1])
    prompt = ring.grow(state.dense, size)
    batch, kv_heads, _, head_dim = prompt.k.shape
    between = jnp.clip(prompt.count - ends, 0, size - ends)
    inner = (_slots(leaf, settings.sinks, size - settings.window) for leaf in prompt[:3])
    indexed = ring.grow(Ring(*inner, between), _whole_tiles(size - ends))
    # A sequence with no token between the ends takes the mean of all its keys.
    first = jnp.where(between > 0, np.int32(settings.sinks), np.int32(0))[:, None]
    last = jnp.where(between > 0, settings.sinks + between, prompt.count)[:, None]
    slot = jnp.arange(size)[None]
    center = _mean(prompt.k, (slot >= first) & (slot < last))
    if not settings.center:
        center = jnp.where(jnp.isnan(center), center, 0)
    planes = jax.lax.map(
        lambda rng: lsh.planes(rng[None, None], head_dim, settings.hashing)[0, 0],
        state.rng.reshape(-1, 2),
    )
    state = state._replace(
        center=center,
        dense=_remove(prompt, settings, between, _whole_tiles(ends + settings.tail)),
        indexed=indexed,
        planes=planes.reshape(batch, kv_heads, head_dim, -1),
        finished=jnp.zeros((batch, indexed.positions.shape[1], 0), jnp.int32),
    )
    return _build(state, settings)


def reserve(spec: Spec, state: IndexState, tokens: int, settings: IndexSettings) -> IndexState:
    """Make room for `tokens`; after prefill, for that many generated tokens.

    If the unindexed tail is too short, it is indexed together with the prompt, and emptied.
    """
    if not prefill_finished(state):
        return state._replace(dense=ring.reserve(state.dense, tokens))
    ends = settings.ends
    room = state.dense.positions.shape[1] - ends
    if tokens <= room:
        return state
    growth = max(tokens - room, settings.tail, min(room, _MAX_STEP))
    prompt = state.prompt_slots
    if ends + prompt + room + growth > rows.MAX_SLOTS:
        raise UserError(
            f"a prompt and its generated tokens are at most {rows.MAX_SLOTS} tokens, and "
            f"{ends + prompt + room + growth} are needed; use a policy of constant memory such as "
            f"{POLICY}"
        )
    size = _whole_tiles(ends + room + growth)
    if not settings.hash_generated:
        longer = size - settings.sinks - state.tail_codes.shape[3]
        tail_codes = jnp.pad(state.tail_codes, ((0, 0), (0, 0), (0, 0), (0, longer)))
        return state._replace(dense=ring.grow(state.dense, size), tail_codes=tail_codes)
    return _index_tail(state, settings, size, _whole_tiles(prompt + room))


@partial(jax.jit, static_argnames=("settings", "size", "places"))
def _index_tail(state: IndexState, settings: IndexSettings, size: int, places: int) -> IndexState:
    """Move the tokens that left the window from `dense` to `indexed`; these get new sizes."""
    state = _to(host_memory.to_device, state) if settings.host_offload else state
    cache, indexed = state.dense, ring.grow(state.indexed, places)
    tail_size = cache.positions.shape[1] - settings.ends
    moved = jnp.clip(cache.count - settings.ends, 0, tail_size)
    tail = Ring(
        *(_slots(leaf, settings.sinks, settings.sinks + tail_size) for leaf in cache[:3]), moved
    )
    place = jnp.arange(places)[None] - indexed.count[:, None]
    comes = (place >= 0) & (place < moved[:, None])
    source = jnp.clip(place, 0, tail_size - 1)

    def join(old: Array, new: Array) -> Array:
        written, slots = (
            (comes, source)
            if old.ndim == 2
            else (comes[:, None, :, None], source[:, None, :, None])
        )
        return jnp.where(written, jnp.take_along_axis(new, slots, axis=old.ndim // 2), old)

    indexed = Ring(*map(join, indexed[:3], tail[:3]), indexed.count + moved)
    remaining = _remove(cache, settings, moved, size)
    return _build(state._replace(dense=remaining, indexed=indexed), settings)


def _whole_tiles(size: int) -> int:
    return -(-size // _TILE) * _TILE


def _slots(leaf: Array, first: int, end: int) -> Array:
    return leaf[:, first:end] if leaf.ndim == 2 else leaf[:, :, first:end]


def _remove(cache: Ring, settings: IndexSettings, gone: Int32[Array, " B"], size: int) -> Ring:
    """The sinks and the tokens after the next `gone`, in `size` slots."""
    slot = jnp.arange(settings.ends)[None]
    source = jnp.where(slot < settings.sinks, slot, slot + gone[:, None])
    source = jnp.minimum(source, cache.positions.shape[1] - 1)
    remaining = Ring(
        *(jnp.take_along_axis(leaf, source[:, None, :, None], axis=2) for leaf in cache[:2]),
        jnp.take_along_axis(cache.positions, source, axis=1),
        # An overfull sequence stays overfull.
        jnp.where(cache.count > cache.positions.shape[1], rows.OVERFULL, cache.count - gone),
    )
    return ring.grow(remaining, size)


def _mean(k: Float[Array, "B K S H"], included: Bool[Array, "B S"]) -> Float32[Array, "B K H"]:
    included = included.astype(jnp.float32)
    share = included / jnp.maximum(1, jnp.sum(included, axis=1, keepdims=True))
    return jnp.einsum("bs,bksh->bkh", share, k.astype(jnp.float32), precision="highest")


def _build(state: IndexState, settings: IndexSettings) -> IndexState:
    """Build the tables of `indexed`, and the codes of the tokens in `dense` after the sinks."""
    batch, kv_heads = state.dense.k.shape[:2]
    size, places = state.dense.positions.shape[1], state.indexed.positions.shape[1]
    valid = jnp.arange(places)[None] < state.indexed.count[:, None]
    hashing, sinks, ends = settings.hashing, settings.sinks, settings.ends

    def build_head(head: Array) -> tuple:
        def pick(leaf: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(leaf.reshape(-1, *leaf.shape[2:]), head, 0, False)

        planes, center = pick(state.planes), pick(state.center)[None]
        indexed = pick(state.indexed.k).astype(jnp.float32) - center
        codes = _codes(indexed, planes, hashing)
        tables = hash_tables.build(codes, valid[head // kv_heads], hashing.bits)
        if not settings.hash_generated:
            none = jnp.zeros((0, size - sinks), jnp.uint16)
            return tables, _norm(indexed), none, jnp.zeros(0, jnp.float32)
        keys = pick(state.dense.k).astype(jnp.float32) - center
        codes = _codes(keys[sinks:ends], planes, hashing).astype(jnp.uint16)
        codes = jnp.pad(codes, ((0, 0), (0, size - ends)))
        return tables, _norm(indexed), codes, _norm(keys)

    built = jax.lax.map(build_head, jnp.arange(batch * kv_heads))
    split = lambda a: a.reshape(batch, kv_heads, *a.shape[1:])
    tables, norms, tail_codes, tail_norms = jax.tree.map(split, built)
    state = state._replace(tables=tables, norms=norms, tail_codes=tail_codes, tail_norms=tail_norms)
    return _to(host_memory.to_host, state) if settings.host_offload else state


def _to(where: Callable[[Array], Array], state: IndexState) -> IndexState:
    """Move the arrays that only `reserve` writes to host memory or to the device."""
    k, v = map(where, state.indexed[:2])
    return state._replace(
        indexed=state.indexed._replace(k=k, v=v), tables=jax.tree.map(where, state.tables)
    )


def _norm(keys: Float32[Array, "... H"]) -> Float32[Array, "..."]:
    """Constants to gradients: a key equal to the mean key has norm 0, where sqrt has none."""
    keys = jax.lax.stop_gradient(keys)
    return jnp.sqrt(jnp.sum(keys * keys, axis=-1))


def _codes(
    keys: Float32[Array, "S H"], planes: Float32[Array, "H R"], hashing: Hashing
) -> Int32[Array, "L S"]:
    """The codes of many keys, in blocks: their products with all planes would be large."""
    count = keys.shape[0]
    if count <= _HASHED:
        return lsh.codes(keys[None], planes[None], hashing)[0]
    key_blocks = jnp.pad(keys, ((0, -count % _HASHED), (0, 0))).reshape(-1, _HASHED, keys.shape[1])
    codes = jax.lax.map(lambda keys: lsh.codes(keys[None], planes[None], hashing)[0], key_blocks)
    return jnp.moveaxis(codes, 0, 1).reshape(hashing.tables, -1)[:, :count]


def append(spec: Spec, state: IndexState, chunk: Chunk, settings: IndexSettings) -> IndexState:
    """Append a chunk; after prefill its codes join the unindexed tail."""
    after = state._replace(
        dense=ring.write(spec, state.dense, chunk, ring.dense_settings(state.dense))
    )
    if not prefill_finished(state) or not settings.hash_generated:
        return after
    batch, tokens, kv_heads, head_dim = chunk.k.shape
    numbers = ring.token_numbers(state.dense, chunk.valid)
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    # Rounded as they are stored: in half precision the tables hash the rounded keys.
    keys = keys.astype(state.dense.k.dtype).astype(jnp.float32) - state.center[:, :, None]
    lost = jnp.any(jnp.isnan(keys) & chunk.valid[:, None, :, None], axis=2)
    flat = keys.reshape(batch * kv_heads, tokens, head_dim)
    planes = state.planes.reshape(batch * kv_heads, head_dim, -1)
    codes = lsh.codes(flat, planes, settings.hashing).reshape(batch, kv_heads, -1, tokens)
    return after._replace(
        center=jnp.where(lost, np.float32(np.nan), state.center),
        tail_norms=_write(state.tail_norms, _norm(keys), numbers),
        tail_codes=_write(state.tail_codes, codes.astype(jnp.uint16), numbers - settings.sinks),
    )


def _write(old: Array, new: Array, at: Int32[Array, "B T"]) -> Array:
    """old [B,...,S] with new [B,...,T] at these places of the last axis; below 0: nowhere."""
    axis, size = old.ndim - 2, old.shape[-1]

    def one_token(old: Array, new: Array, at: Array) -> Array:
        before = jax.lax.dynamic_slice_in_dim(old, at[0], 1, axis)
        within = (at[0] >= 0) & (at[0] < size)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(within, new, before), at[0], axis)

    def many(old: Array, new: Array, at: Array) -> Array:
        return old.at[..., jnp.where(at < 0, size, at)].set(new, mode="drop")

    return xla_cpu.map_sequences(one_token if at.shape[1] == 1 else many, old, new, at)


def token_numbers(state: IndexState, valid: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Each token's number in its sequence, from 0; -1 for padding."""
    dense_numbers = ring.token_numbers(state.dense, valid)
    return jnp.where(valid, dense_numbers + state.indexed.count[:, None], dense_numbers)


def slot_of(state: IndexState, numbers: Int32[Array, "B ..."]) -> Int32[Array, "B ..."]:
    """The slot in `dense` of a token that is not indexed; padding stays below 0."""
    indexed = state.indexed.count.reshape(-1, *[1] * (numbers.ndim - 1))
    return jnp.where(numbers < 0, numbers, numbers - indexed)


def angles(state: IndexState, norms: Float32[Array, "B K S"], q: Float[Array, "B N H"]) -> Angles:
    """What turns the product of a query and a stored key into the cosine with the centred key."""
    batch, heads, head_dim = q.shape
    q = q.astype(jnp.float32)
    grouped = q.reshape(batch, state.center.shape[1], -1, head_dim)
    shift = jnp.einsum("bkgh,bkh->bkg", grouped, state.center, precision="highest")
    return Angles(norms, shift.reshape(batch, heads), _norm(q))


def has_nan(state: IndexState) -> Bool[Array, "B K"]:
    """The KV heads of which a hashed key is NaN."""
    return jnp.any(jnp.isnan(state.center), axis=2)


def cached(state: IndexState) -> Cached:
    """The tokens of `dense`, then the indexed ones."""
    exact, indexed = ring.cached(state.dense), ring.cached(state.indexed)
    return Cached(
        jnp.concatenate([exact.positions, indexed.positions], axis=2),
        jnp.concatenate([exact.log_weight, indexed.log_weight], axis=2),
    )
