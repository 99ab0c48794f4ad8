"""MagicPIG (Chen et al. 2024): of a long prompt, the keys that fall into a query's hash buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import buckets, exact, hashed, lsh, memory, slots
from jaxkv import sample as drawn
from jaxkv.attention import local_attention, merge, slot_attention
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.hashed import Hashed, Indexing
from jaxkv.lsh import Hashing
from jaxkv.pallas_kernels.sampled_attention import How, sampled_attention
from jaxkv.pieces import in_pieces
from jaxkv.slots import Slots
from jaxkv.typing import Array, Float, Int32, UInt32

_PIECE = 256  # queries whose newest tokens are met together


@dataclass(frozen=True)
class MagicPIG:
    """Attend to a prompt exactly; behind it, to its first `sinks` tokens and the newest `window`
    exactly, and of those between to the keys that have a query's code in at least `min_tables` of
    `L` tables of `K` bits, weighted by one over the chance of that. Every token is kept.

    Each query head samples for itself, from tables that it shares with its kv head. center: keys
    are hashed less their mean, without which few are found. budget: keys of a query head at the
    most; of more than that as many are drawn, and count for the others. u_floor: added to the
    chance, 1e-4 in the published code, which keeps rare keys from counting for much, and 0 in the
    paper, which leaves the estimate unbiased. hash_generated: what follows the prompt is sampled
    too, once it has left the window; if not, all of it stays exact, as published. zone: so many
    tokens wait behind the tables until new ones are made of all, later up to 8,192. hash: a bit of
    each of K directions, or the nearest of up to sixteen (crosspolytope), which separates better
    and takes longer to compute. memory: host keeps what is in the tables, and them, in the memory
    of the host, from where a token brings what it meets. start: slots before the prompt comes,
    doubled as they fill.

    Where keys have a bias (ALiBi) rows that are met are read twice, to weigh them and to attend.

    A question read behind `seal` meets a sample as well: read it with the prompt to have it exact.
    """

    K: int = 10
    L: int = 150
    sinks: int = 4
    window: int = 64
    center: bool = True
    min_tables: int = 2
    budget: int = 4096
    u_floor: float = 0.0
    hash_generated: bool = True
    zone: int = 1024
    hash: Literal["simhash", "crosspolytope"] = "simhash"
    memory: Literal["device", "host"] = "device"
    start: int = 512

    summary: ClassVar[str] = "every token; behind a prompt, a sample of its keys by hash tables"
    source: ClassVar[str] = "MagicPIG, arXiv 2410.16179"
    formula: ClassVar[str] = (
        "start * (2 * K * H * itemsize + 4) + 8 + 8 * K + 4 * K * H, doubling, until the prompt is"
        " sealed; then a kv head has more: in each of L tables 2 or 4 bytes a slot, an eighth more"
        " to fill blocks, and 4 * 2^bits, planes of 4 * H * bits * L, and codes of 2 * L for each"
        " slot behind the tables, as many as what is generated, for which there is room twice"
    )
    axes: ClassVar[Hashed] = hashed.AXES
    shared: ClassVar[tuple[str, ...]] = hashed.SHARED
    appends: ClassVar[tuple[str, ...]] = hashed.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        _ = self.indexing
        slots.check(self.sinks, self.window, "absolute")
        if not 1 <= self.budget <= buckets.MOST:
            raise UserError(
                f"budget must be from 1 to {buckets.MOST}, got {self.budget}; try budget=4096"
            )
        if self.memory not in ("device", "host"):
            raise UserError(
                f"memory must be device or host, got {self.memory!r}; try memory=device"
            )
        if max(self.sinks, self.window) > hashed.MOST:
            raise UserError(
                f"sinks and window must be at most {hashed.MOST}, got {self.sinks} and "
                f"{self.window}; try sinks=4,window=64"
            )
        for name, value, usual in (("start", self.start, 512), ("zone", self.zone, 1024)):
            if not 1 <= value <= hashed.MOST:
                raise UserError(
                    f"{name} must be from 1 to {hashed.MOST}, got {value}; try {name}={usual}"
                )

    @property
    def indexing(self) -> Indexing:
        """What the state is told of this policy."""
        how = Hashing(self.K, self.L, self.min_tables, self.u_floor, self.hash)
        return Indexing(
            how, self.sinks, self.window, self.center, self.hash_generated, self.zone,
            self.memory == "host",
        )  # fmt: skip

    @property
    def least(self) -> int:
        return self.sinks + self.window + 1

    @property
    def on_host(self) -> tuple[str, ...]:
        return hashed.ON_HOST if self.memory == "host" else ()

    def init(self, spec: Spec, rows: int, key: jax.Array) -> Hashed:
        if self.memory == "host":
            memory.check_host("memory=host")
        return hashed.init(spec, rows, key, self.start)

    def reserve(self, spec: Spec, state: Hashed, tokens: int) -> Hashed:
        return hashed.reserve(spec, state, tokens, self.indexing)

    def seal(self, spec: Spec, state: Hashed) -> Hashed:
        return hashed.seal(state, self.indexing)

    def kept(self, spec: Spec, state: Hashed) -> Kept:
        return hashed.kept(state)

    def attend(self, spec: Spec, state: Hashed, chunk: Chunk) -> Partial:
        return self.take(spec, state, chunk)[0]

    def extend(self, spec: Spec, state: Hashed, chunk: Chunk) -> Hashed:
        return hashed.extend(spec, state, chunk, self.indexing)

    def decode(self, spec: Spec, state: Hashed, chunk: Chunk) -> tuple[Partial, Hashed]:
        if not hashed.is_sealed(state):
            partial, held = exact.decode(spec, state.exact, chunk)
            return partial, state._replace(exact=held)
        numbers = hashed.number(state, chunk.valid)
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        seen = self.ask(spec, state, q, numbers, chunk.positions)
        after = self.extend(spec, state, drawn.behind(chunk, seen.out))
        return exact.refuse(merge(seen, local_attention(spec, chunk)), after.exact), after

    def take(self, spec: Spec, state: Hashed, chunk: Chunk) -> tuple[Partial, Hashed]:
        if chunk.valid.shape[1] == 1:
            return self.decode(spec, state, chunk)
        if hashed.is_sealed(state):
            return in_pieces(partial(self._take, spec), state, chunk, _PIECE)
        return exact.attend(spec, state.exact, chunk), self.extend(spec, state, chunk)

    def _take(self, spec: Spec, state: Hashed, chunk: Chunk) -> tuple[Partial, Hashed]:
        """A sealed state: the chunk is absorbed first, then each token sees what is before it."""
        numbers = hashed.number(state, chunk.valid)
        state = self.extend(spec, state, chunk)
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        partial = self.ask(spec, state, q, numbers, chunk.positions)
        return exact.refuse(partial, state.exact), state

    def ask(
        self, spec: Spec, state: Hashed, q: Float[Array, "B T N H"], numbers: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
    ) -> Partial:  # fmt: skip
        """What queries see of a sealed state: q turned, and of which tokens, -1 of none. Their own
        keys are seen where the state holds them."""
        near = self._near(spec, state, q, numbers, positions)
        each = q, numbers, positions
        if numbers.shape[1] == 1:
            far = self.sample(spec, state, *(leaf[:, 0] for leaf in each))
            far = Partial(*(leaf[:, None] for leaf in far))
        else:
            each = tuple(jnp.moveaxis(leaf, 1, 0) for leaf in each)
            far = jax.lax.map(lambda one: self.sample(spec, state, *one), each)
            far = Partial(*(jnp.moveaxis(leaf, 0, 1) for leaf in far))
        return merge(near, far)

    def _near(
        self, spec: Spec, state: Hashed, q: Array, numbers: Array, positions: Array
    ) -> Partial:
        """The first tokens and the newest, as each query finds them."""
        held, tokens = state.exact, numbers.shape[1]
        size, own = held.positions.shape[1], hashed.slot_of(state, numbers)
        last = jnp.minimum(own, held.count[:, None] - 1)

        def part(k: Array, v: Array, keys: Array, slot: Array, first: Array) -> Partial:
            seen = (slot[:, None] >= first[:, :, None]) & (slot[:, None] <= last[:, :, None])
            bias = jnp.where(seen, np.float32(0), -jnp.inf)[:, None, None]
            penalty = spec.encoding.bias(positions, keys, k.shape[1])
            bias = bias if penalty is None else bias + penalty
            return slot_attention(q, k, v, bias, spec.scale, spec.softcap)

        if not self.hash_generated:  # all that is not in the tables
            return part(*held[:3], jnp.arange(size)[None], jnp.zeros_like(own))
        oldest = jnp.min(jnp.where(own < 0, np.int32(size), own), axis=1)
        width = min(size, self.window + tokens - 1)
        begin = jnp.clip(oldest + 1 - self.window, 0, size - width)
        tail = (_cut(leaf, begin, width) for leaf in held[:3])
        slot = begin[:, None] + jnp.arange(width)[None]
        parts = [part(*tail, slot, jnp.maximum(own - self.window + 1, self.sinks))]
        if self.sinks:
            first = held.k[:, :, : self.sinks], held.v[:, :, : self.sinks]
            slot, keys = jnp.arange(self.sinks)[None], held.positions[:, : self.sinks]
            parts.append(part(*first, keys, slot, jnp.zeros_like(own)))
        return merge(*parts)

    def sample(
        self, spec: Spec, state: Hashed, q: Float[Array, "B N H"], numbers: Array, positions: Array
    ) -> Partial:
        """A sample of what lies between, for one token a row: out [B,N,H], lse [B,N]."""
        found = hashed.find(state, self.indexing, self.budget, q, numbers, positions)
        count = jnp.where(numbers[:, None] < 0, 0, found.count)  # padding
        places = state.far.positions.shape[1]
        place = jnp.arange(found.rows.shape[2])[None, None]
        indexed = (place < count[:, :, None]) & (found.rows < places)
        indexed = jnp.sum(indexed, axis=2, dtype=jnp.int32)
        part = self._meet(spec, state, state.far, state.norms, q, positions, found.rows, indexed)
        if self.hash_generated:  # the zone's come behind those of the tables

            def meet_zone() -> Partial:
                behind = jnp.minimum(place + indexed[:, :, None], found.rows.shape[2] - 1)
                rows = jnp.take_along_axis(found.rows, behind, axis=2) - places + self.sinks
                given = state.exact, state.waiting, q, positions, rows, count - indexed
                return merge(part, self._meet(spec, state, *given))

            part = jax.lax.cond(jnp.any(count > indexed), meet_zone, lambda: part)
        lost = jnp.repeat(hashed.is_lost(state), q.shape[1] // state.center.shape[1], axis=1)
        nan = np.float32(np.nan)
        part = Partial(jnp.where(lost[:, :, None], nan, part.out), jnp.where(lost, nan, part.lse))
        # Of more than the budget each stands for others.
        share = found.total.astype(jnp.float32) / jnp.maximum(found.count, 1).astype(jnp.float32)
        return part._replace(lse=part.lse + jnp.log(jnp.maximum(share, 1)))

    def _meet(
        self, spec: Spec, state: Hashed, held: Slots, norms: Array, q: Array, positions: Array,
        rows: Array, count: Array,
    ) -> Partial:  # fmt: skip
        """The first `count` of these rows of what is held, each by the chance that it was drawn."""
        angles = hashed.angles(state, norms, q)
        how, weight = How(spec.scale, spec.softcap, self.indexing.how), angles
        penalty = spec.encoding.bias(positions[:, None], held.positions, held.k.shape[1])
        if penalty is not None:
            how = how._replace(weigh=None)
            rows = jnp.clip(rows, 0, held.positions.shape[1] - 1)
            weight = lsh.log_weights(held.k, q, rows, angles, self.indexing.how)
            penalty = penalty.reshape(*q.shape[:2], -1)
            weight = weight + jnp.take_along_axis(penalty, rows, axis=2)
        return Partial(*sampled_attention(q, held.k, held.v, rows, count, weight, how=how))


def _cut(leaf: Array, begin: Int32[Array, " B"], width: int) -> Array:
    """[B,...,S,H] or [B,S] of each row from its own beginning on."""
    axis = 0 if leaf.ndim == 2 else 1

    def one(row: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, at, width, axis)

    return one(leaf[0], begin[0])[None] if leaf.shape[0] == 1 else jax.vmap(one)(leaf, begin)
