"""Which keys a query meets, where it may choose among all of them: what the yardsticks share.

A prompt is attended exactly until `seal`. From then on a query sees the first tokens and the newest
as they are, and of those between it meets the ones that the policy chooses for it, each query head
for itself. Every token is kept for ever and every key is read to choose: this says what a choice
is worth, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import exact, slots, thinned
from jaxkv import sample as drawn
from jaxkv.attention import blend, scores
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.pieces import in_pieces
from jaxkv.slots import Slots
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

_PIECE = 16  # queries whose logits of all keys stand at a time
_ROUNDING = 2.5e-7  # what float32 may add to a share of n


class MetState(NamedTuple):
    """exact: every token. key: of the draws. sealed: no bytes; X is 0 until the prompt is complete,
    and then the slots it had, for `reserve` is told of the tokens behind it alone."""

    exact: Slots
    sealed: Int32[Array, "B X 0"]
    key: UInt32[Array, "B K 2"]


AXES = MetState(slots.AXES, ("B", "X", "0"), ("B", "K", "2"))
SHARED = tuple(f"exact.{name}" for name in slots.SHARED)
APPENDS = tuple(f"exact.{name}" for name in slots.APPENDS)
FORMULA = "start * (2 * K * H * itemsize + 4) + 4 + 8 * K, doubling as tokens come"


class Asked(NamedTuple):
    """Queries and the keys of their rows, of which slot n holds token number n.

    logits: scaled, capped and with their distance penalty; of slots that hold nothing some finite
    number. exact: what a query sees as it is; between: what there is to choose from. q, k: turned.
    at: where the queries stand; positions: where the keys do.
    """

    logits: Float32[Array, "B K G T S"]
    exact: Bool[Array, "B 1 1 T S"]
    between: Bool[Array, "B 1 1 T S"]
    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    at: UInt32[Array, "B T"]
    positions: UInt32[Array, "B S"]
    key: UInt32[Array, "B K 2"]


# The log weight of each key between, -inf where it is not met and everywhere else [B,K,G,T,S].
Choose = Callable[[Asked], Array]


def check(sinks: int, window: int, start: int) -> None:
    """Raise UserError for ends that cannot be, or first slots."""
    thinned.check(thinned.Ends(sinks, window), start, (4, 64))


def check_share(name: str, value: float, good: float = 0.1) -> None:
    """Raise UserError unless value is a part of the whole; good: one that would do."""
    if not 0 < value <= 1:
        raise UserError(f"{name} must be above 0 and at most 1, got {value}; try {name}={good}")


@runtime_checkable
class Chooses(Protocol):
    """What a policy brings itself. The functions below are its methods: those that take it as they
    are, those that need nothing of it as static methods."""

    sinks: int
    window: int
    start: int

    def choose(self, asked: Asked) -> Array: ...


def init(policy: Chooses, spec: Spec, rows: int, key: jax.Array) -> MetState:
    """No tokens yet."""
    sealed = jnp.zeros((rows, 0, 0), jnp.int32)
    return MetState(slots.init(spec, rows, policy.start), sealed, drawn.keys(key, spec, rows))


def attend(policy: Chooses, spec: Spec, state: MetState, chunk: Chunk) -> Partial:
    """What the queries of a chunk see."""
    return take(policy, spec, state, chunk)[0]


def take(policy: Chooses, spec: Spec, state: MetState, chunk: Chunk) -> tuple[Partial, MetState]:
    """What they see, and the state with the chunk."""
    return meet(spec, state, chunk, policy.sinks, policy.window, policy.choose)


def reserve(spec: Spec, state: MetState, tokens: int) -> MetState:
    """Room for `tokens`, or once the prompt is sealed for so many behind it."""
    tokens += state.sealed.shape[1]
    return state._replace(exact=exact.reserve(state.exact, tokens, thinned.MOST))


def seal(spec: Spec, state: MetState) -> MetState:
    """From now on queries choose; nothing is dropped."""
    return state._replace(sealed=jnp.zeros((*state.exact.positions.shape, 0), jnp.int32))


def extend(spec: Spec, state: MetState, chunk: Chunk) -> MetState:
    """The state with the chunk."""
    return state._replace(exact=exact.extend(spec, state.exact, chunk))


def meet(
    spec: Spec, state: MetState, chunk: Chunk, sinks: int, window: int, choose: Choose
) -> tuple[Partial, MetState]:
    """The chunk is held first; then each query sees what was there by its own number."""
    if state.sealed.shape[1] == 0:
        if chunk.valid.shape[1] == 1:
            partial, held = exact.decode(spec, state.exact, chunk)
            return partial, state._replace(exact=held)
        return exact.attend(spec, state.exact, chunk), extend(spec, state, chunk)
    after = extend(spec, state, chunk)

    def some(count: Int32[Array, " B"], piece: Chunk) -> tuple[Partial, Array]:
        numbers = count[:, None] + jnp.cumsum(piece.valid.astype(jnp.int32), axis=1) - 1
        asked = _ask(spec, after, piece, jnp.where(piece.valid, numbers, -1), sinks, window)
        bias = jnp.where(asked.exact, np.float32(0), choose(asked))
        return blend(asked.logits + bias, after.exact.v), numbers[:, -1] + 1

    partial, _ = in_pieces(some, state.exact.count, chunk, _PIECE)
    return exact.refuse(partial, after.exact), after


def _ask(
    spec: Spec, state: MetState, chunk: Chunk, numbers: Int32[Array, "B T"], sinks: int, window: int
) -> Asked:
    held = state.exact
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    logits = scores(q, held.k, spec.scale, spec.softcap)
    penalty = spec.encoding.bias(chunk.positions, held.positions, held.k.shape[1])
    slot = jnp.arange(held.positions.shape[1])[None, None]
    own = numbers[:, :, None]
    ends = (slot < sinks) | (slot > own - window)
    there, ends = ((slot <= own)[:, None, None], ends[:, None, None])
    return Asked(
        logits if penalty is None else logits + penalty,
        there & ends, there & ~ends,
        q, held.k, chunk.positions, held.positions, state.key,
    )  # fmt: skip


def kept(spec: Spec, state: MetState) -> Kept:
    return slots.kept(state.exact)


def part(share: float, among: Bool[Array, "... S"]) -> Int32[Array, "... 1"]:
    """How many are a share of these, rounded up."""
    count = jnp.sum(among, axis=-1, keepdims=True, dtype=jnp.int32)
    wanted = count.astype(jnp.float32) * np.float32(share * (1 - _ROUNDING))
    return jnp.ceil(wanted).astype(jnp.int32)


def largest(
    score: Float32[Array, "B K G T S"],
    among: Bool[Array, "#B #K #G #T S"],
    count: Int32[Array, "#B #K #G #T 1"],
) -> Bool[Array, "B K G T S"]:
    """Which are the `count` largest, of equals the first, or all where there are fewer."""
    score = jnp.where(among, jax.lax.stop_gradient(score), -jnp.inf)
    slots = score.shape[-1]
    least = jnp.clip(slots - count, 0, slots - 1)
    least = jnp.broadcast_to(least, (*score.shape[:-1], 1))
    least = jnp.take_along_axis(jnp.sort(score, axis=-1), least, axis=-1)
    above, equal = score > least, (score == least) & among
    left = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32), axis=-1) <= left))


def only(met: Bool[Array, "B K G T S"]) -> Float32[Array, "B K G T S"]:
    """The bias where each key that is met counts for itself."""
    return jnp.where(met, np.float32(0), -jnp.inf)


def log_sum(
    logits: Float32[Array, "B K G T S"], among: Bool[Array, "#B #K #G #T S"]
) -> Float32[Array, "B K G T 1"]:
    """The log of the sum of exponentials, -inf of none, with gradients that are numbers."""
    masked = jnp.where(among, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    total = jnp.sum(jnp.exp(masked - top), axis=-1, keepdims=True)
    return jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))


def chances(asked: Asked, numbers: UInt32[Array, "#B 1 M"]) -> Float32[Array, "B K G T M"]:
    """Draws from 0 to less than 1, by number, of each query head and where the query stands."""
    rows, kv_heads, group, queries, _ = asked.logits.shape
    head = jnp.arange(group, dtype=jnp.uint32)[None, :, None]
    of_query = (asked.at[:, None] * np.uint32(group) + head) * drawn.GOLDEN  # [B,G,T]
    each = (of_query[..., None] + numbers[:, None]).reshape(rows, 1, -1)
    return drawn.uniforms(each, asked.key).reshape(rows, kv_heads, group, queries, -1)
