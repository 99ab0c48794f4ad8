"""Sparse attention with a free choice of keys: what the oracle baselines share.

A prompt is attended exactly until `finish_prefill`. After it, each query head attends exactly to
the first and the newest tokens, and of the other keys to those that the policy selects for it.
Every token stays cached and every key is read to select, so these policies save neither memory nor
time. They measure how good a selection can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import contract, draws, rows
from jaxkv.attention import blend, chunked_scan, scores
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec, State, prefill_finished
from jaxkv.errors import UserError
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

_SCAN = 16  # queries whose logits of all keys are in memory at a time
_ROUNDING = 2.5e-7  # the most that float32 adds to a share of n


class SparseState(NamedTuple):
    """dense: every token. rng: seeds of the draws.

    finished: no bytes. X is 0 during prefill and then the slots that the prompt had: `reserve` sees
    only shapes, and must know that its tokens count from the end of prefill.
    """

    dense: Ring
    finished: Int32[Array, "B X 0"]
    rng: UInt32[Array, "B K 2"]

    @property
    def prompt_slots(self) -> int:
        return self.finished.shape[1]


LEAVES = SparseState(ring.DENSE_LEAVES, Leaf("B X 0"), Leaf("B K 2"))


class Candidates(NamedTuple):
    """Queries, and the keys of their sequences; slot n stores token number n.

    logits: scaled, capped and with their distance penalty; some finite number in empty slots.
    exact: keys that a query attends to in any case. selectable: the others up to its own. q, k:
    rotated.
    """

    logits: Float32[Array, "B K G T S"]
    exact: Bool[Array, "B 1 1 T S"]
    selectable: Bool[Array, "B 1 1 T S"]
    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    query_positions: UInt32[Array, "B T"]
    key_positions: UInt32[Array, "B S"]
    rng: UInt32[Array, "B K 2"]


# The log weight of each selectable key [B,K,G,T,S], -inf where it is not selected.
Select = Callable[[Candidates], Array]


def check_share(name: str, value: float, example: float = 0.1) -> None:
    """Raise UserError unless value is in (0, 1]; example: a value that would do."""
    if not 0 < value <= 1:
        raise UserError(f"{name} must be above 0 and at most 1, got {value}; try {name}={example}")


class SparsePolicy(Policy):
    """A policy that selects keys: a frozen dataclass with these three fields and `select`."""

    sinks: int
    window: int
    start: int

    leaves: ClassVar[SparseState] = LEAVES
    grows: ClassVar[bool] = True
    min_prompt: ClassVar[int] = 0

    def __post_init__(self) -> None:
        rows.check_sizes(self.sinks, self.window, self.start, "sinks=4,window=64,start=512")

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        """The log weight of each selectable key, -inf where it is not selected."""
        raise contract.missing(self, "select")

    def selection(self, state: State) -> Select:
        """`select`, or a function that also reads the state."""
        return self.select

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> SparseState:
        return SparseState(
            ring.init(spec, batch, self.start),
            jnp.zeros((batch, 0, 0), jnp.int32),
            draws.seeds(rng, spec, batch),
        )

    def update(self, spec: Spec, state: State, chunk: Chunk) -> tuple[Partial, State]:
        return attend_selected(spec, state, chunk, self.sinks, self.window, self.selection(state))

    def cached(self, spec: Spec, state: State) -> Cached:
        return ring.cached(state.dense)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        slots = rows.slots_for(tokens, self.start)
        return ring.nbytes(spec, slots) + 8 * spec.kv_heads

    def reserve(self, spec: Spec, state: State, tokens: int) -> State:
        """Room for `tokens`; after prefill for that many generated tokens."""
        tokens += state.prompt_slots
        return state._replace(dense=ring.reserve(state.dense, tokens))

    def finish_prefill(self, spec: Spec, state: State) -> State:
        """From now on queries select; every token stays cached.

        Raises UserError for a state whose prefill is finished.
        """
        contract.check_prefill_unfinished(state)
        slots = state.dense.positions.shape
        return state._replace(finished=jnp.zeros((*slots, 0), jnp.int32))


def attend_selected(
    spec: Spec, state: State, chunk: Chunk, sinks: int, window: int, select: Select
) -> tuple[Partial, State]:
    """Append the chunk first; then each query sees the tokens up to its own number."""
    if not prefill_finished(state):
        partial, appended = ring.update(spec, state.dense, chunk, ring.dense_settings(state.dense))
        return partial, state._replace(dense=appended)
    after = state._replace(
        dense=ring.write(spec, state.dense, chunk, ring.dense_settings(state.dense))
    )

    def attend(count: Int32[Array, " B"], piece: Chunk) -> tuple[Partial, Array]:
        numbers = count[:, None] + jnp.cumsum(piece.valid.astype(jnp.int32), axis=1) - 1
        query_numbers = jnp.where(piece.valid, numbers, -1)
        candidates = _candidates(spec, after, piece, query_numbers, sinks, window)
        bias = jnp.where(candidates.exact, np.float32(0), select(candidates))
        return blend(candidates.logits + bias, after.dense.v), numbers[:, -1] + 1

    partial, _ = chunked_scan(attend, state.dense.count, chunk, _SCAN)
    return ring.refuse_overfull(partial, after.dense), after


def _candidates(
    spec: Spec,
    state: State,
    chunk: Chunk,
    numbers: Int32[Array, "B T"],
    sinks: int,
    window: int,
) -> Candidates:
    cache = state.dense
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    logits = scores(q, cache.k, spec.scale, spec.softcap)
    penalty = spec.encoding.bias(chunk.positions, cache.positions, cache.k.shape[1])
    slot = jnp.arange(cache.positions.shape[1])[None, None]
    query_slot = numbers[:, :, None]
    near = ((slot < sinks) | (slot > query_slot - window))[:, None, None]
    seen = (slot <= query_slot)[:, None, None]
    return Candidates(
        logits if penalty is None else logits + penalty,
        seen & near,
        seen & ~near,
        q,
        cache.k,
        chunk.positions,
        cache.positions,
        state.rng,
    )


def share_of(share: float, among: Bool[Array, "... S"]) -> Int32[Array, "... 1"]:
    """How many keys are a share of these, rounded up."""
    count = jnp.sum(among, axis=-1, keepdims=True, dtype=jnp.int32)
    target = count.astype(jnp.float32) * np.float32(share * (1 - _ROUNDING))
    return jnp.ceil(target).astype(jnp.int32)


def largest(
    score: Float32[Array, "B K G T S"],
    among: Bool[Array, "#B #K #G #T S"],
    count: Int32[Array, "#B #K #G #T 1"],
) -> Bool[Array, "B K G T S"]:
    """The `count` largest, of equals the first, or all where there are fewer."""
    order = _order(jnp.where(among, jax.lax.stop_gradient(score), -jnp.inf))
    threshold = _nth_largest(order, count)
    above, equal = order > threshold, (order == threshold) & among
    num_ties = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32), axis=-1) <= num_ties))


def _order(score: Float32[Array, "... S"]) -> UInt32[Array, "... S"]:
    """Integers in the order of the numbers; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, np.float32(0), score), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def _nth_largest(
    order: UInt32[Array, "... S"], count: Int32[Array, "... 1"]
) -> UInt32[Array, "... 1"]:
    """The largest number that at least `count` of S reach, bit by bit: a sort costs more."""

    def set_bit(place: Array, minimum: Array) -> Array:
        higher = minimum | (np.uint32(1 << 31) >> place.astype(jnp.uint32))
        num_at_least = jnp.sum(order >= higher, axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(num_at_least >= count, higher, minimum)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros((*order.shape[:-1], 1), jnp.uint32))


def unweighted(selected: Bool[Array, "B K G T S"]) -> Float32[Array, "B K G T S"]:
    """The log weights where each selected key counts once."""
    return jnp.where(selected, np.float32(0), -jnp.inf)


def log_sum(
    logits: Float32[Array, "B K G T S"], among: Bool[Array, "#B #K #G #T S"]
) -> Float32[Array, "B K G T 1"]:
    """The log of the sum of exponentials, -inf of none, with finite gradients."""
    masked = jnp.where(among, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    total = jnp.sum(jnp.exp(masked - top), axis=-1, keepdims=True)
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))


def uniforms(
    candidates: Candidates, numbers: UInt32[Array, "#B 1 M"]
) -> Float32[Array, "B K G T M"]:
    """Draws in [0, 1), by number, query head and query position."""
    batch, kv_heads, group, queries, _ = candidates.logits.shape
    head = jnp.arange(group, dtype=jnp.uint32)[None, :, None]
    query = candidates.query_positions[:, None] * np.uint32(group) + head
    query = query * draws.GOLDEN  # [B,G,T]
    draw_numbers = (query[..., None] + numbers[:, None]).reshape(batch, 1, -1)
    uniforms = draws.uniforms(draw_numbers, candidates.rng)
    return uniforms.reshape(batch, kv_heads, group, queries, -1)
