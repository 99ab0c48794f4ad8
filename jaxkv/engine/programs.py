"""What the engine compiles: all of it ahead, and nothing while it serves.

A prompt is read alone, in a lane of one row and on one grid of chunks, so that its bits depend on
nothing but itself; then the row is sealed and put into a slot. All slots decode together, however
few are in use, so that a row's bits do not depend on who else is there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, Spec, State
from jaxkv.sampling import Knobs, draw_each
from jaxkv.state import batch, memory
from jaxkv.state.loop_carry import deduplicate_shared
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

TOP = 20  # likeliest tokens that may be asked for


@dataclass(frozen=True, eq=False)
class Model:
    """What the engine runs.

    forward: (weights, tokens [B,T] int32, positions [B,T] uint32, valid [B,T] bool, states, places
    [B,P] int32) -> (float32 logits [B,P,V] of the tokens behind those places, states); states: one
    a layer, each for the policy of that layer. identity: what weights and their arithmetic are,
    so that caches of others are never taken for its own.
    """

    forward: Callable[..., tuple[Array, tuple[State, ...]]]
    weights: Any
    policies: tuple[Policy, ...]
    spec: Spec
    vocab: int
    identity: str = ""


class Lane(NamedTuple):
    """A prompt that is being read: one row, not sealed yet. logits: of what comes next."""

    states: tuple[State, ...]
    logits: Float32[Array, "1 V"]


class Slots(NamedTuple):
    """The rows that write, S of them. token: drawn and not yet fed; position: where it stands."""

    states: tuple[State, ...]
    token: Int32[Array, " S"]
    position: UInt32[Array, " S"]
    keys: UInt32[Array, "S 2"]
    knobs: Knobs
    seen: Bool[Array, "S V"]  # tokens of the row, for the repetition penalty
    counts: Int32[Array, "S V"]  # of those generated, for the other penalties
    penalties: Float32[Array, "S 2"]  # presence, frequency
    bias: Float32[Array, "S V"]


class Asked(NamedTuple):
    """What a row brings to its slot besides its states."""

    position: UInt32[Array, " 1"]
    seed: UInt32[Array, " 1"]
    knobs: Knobs
    seen: Bool[Array, "1 V"]
    penalties: Float32[Array, "1 2"]
    bias: Float32[Array, "1 V"]


class Told(NamedTuple):
    """Tokens, their log probabilities, the likeliest with theirs; whether logits were numbers."""

    token: Int32[Array, " N"]
    logprob: Float32[Array, " N"]
    top: Int32[Array, "N 20"]
    top_logprobs: Float32[Array, "N 20"]
    sound: Bool[Array, " N"]


def begin(model: Model, room: int, salt: UInt32[Array, ""]) -> Lane:
    """An empty lane with room for so many tokens; what policies draw follows from the salt."""
    key = jax.random.key(salt)

    def state(layer: int, policy: Policy) -> State:
        one = policy.init(model.spec, 1, jax.random.fold_in(key, layer))
        return policy.reserve(model.spec, one, room)

    states = tuple(state(layer, policy) for layer, policy in enumerate(model.policies))
    return Lane(states, jnp.zeros((1, model.vocab), jnp.float32))


def read(
    model: Model,
    scored: bool,
    weights: Any,
    lane: Lane,
    tokens: Int32[Array, "1 T"],
    start: UInt32[Array, ""],
    count: Int32[Array, ""],
) -> tuple[Lane, Told | None]:
    """Absorb the first `count` of a chunk's tokens; scored: and tell what each was given.

    The first token of a prompt was given nothing: what is told of it means nothing.
    """
    width = tokens.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    positions, valid = start + place.astype(jnp.uint32), place < count
    places = place if scored else jnp.reshape(count - 1, (1, 1))
    logits, states = model.forward(weights, tokens, positions, valid, _shared(model, lane), places)
    if not scored:
        return Lane(states, logits[:, 0]), None
    last = jax.lax.dynamic_slice_in_dim(logits, count - 1, 1, axis=1)[:, 0]
    before = jnp.concatenate([lane.logits, logits[0, :-1]])
    return Lane(states, last), _tell(before, tokens[0], True)


def place(
    model: Model, room: int, slots: Slots, slot: Int32[Array, ""], lane: Lane, asked: Asked
) -> tuple[Slots, Told]:
    """Seal a lane, put it into a slot and draw its first token."""
    states = tuple(_sealed(model, room, *each) for each in _each(model, lane.states))
    key = jax.random.key(asked.seed[0])
    row = Slots(
        states=states,
        token=jnp.zeros(1, jnp.int32),
        position=asked.position,
        keys=jax.random.key_data(jax.random.split(key)[0])[None],
        knobs=asked.knobs,
        seen=asked.seen,
        counts=jnp.zeros((1, model.vocab), jnp.int32),
        penalties=asked.penalties,
        bias=asked.bias,
    )
    row, told = _draw(row, lane.logits, jnp.ones(1, bool), True)
    return jax.tree.map(lambda all, one: all.at[slot].set(one[0]), slots, row), told


def decode(
    model: Model, weights: Any, slots: Slots, active: Bool[Array, " S"], scored: Bool[Array, ""]
) -> tuple[Slots, Told]:
    """Feed each active row its token and draw the next one; other rows stay as they are."""
    logits, states = model.forward(
        weights,
        slots.token[:, None],
        slots.position[:, None],
        active[:, None],
        _shared(model, slots),
        jnp.zeros((slots.token.shape[0], 1), jnp.int32),
    )
    fed = slots._replace(states=states, position=slots.position + active.astype(jnp.uint32))
    return _draw(fed, logits[:, 0], active, scored)


def empty(model: Model, count: int, room: int) -> Slots:
    """So many slots that nobody is in."""

    def row(_: None) -> tuple[State, ...]:
        lane = begin(model, room, jnp.uint32(0))
        return tuple(_sealed(model, room, *each) for each in _each(model, lane.states))

    shapes = jax.eval_shape(row, None)
    states = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), shapes)
    return Slots(
        states=states,
        token=jnp.zeros(count, jnp.int32),
        position=jnp.zeros(count, jnp.uint32),
        keys=jnp.zeros((count, 2), jnp.uint32),
        knobs=Knobs(*(jnp.zeros(count, dtype) for dtype in ("f4", "i4", "f4", "f4", "f4"))),
        seen=jnp.zeros((count, model.vocab), bool),
        counts=jnp.zeros((count, model.vocab), jnp.int32),
        penalties=jnp.zeros((count, 2), jnp.float32),
        bias=jnp.zeros((count, model.vocab), jnp.float32),
    )


def _each(model: Model, states: Sequence[State]) -> Sequence[tuple[Policy, State]]:
    return list(zip(model.policies, states, strict=True))


def _sealed(model: Model, room: int, policy: Policy, state: State) -> State:
    if policy.min_prompt is None:
        return state
    state = policy.finish_prefill(model.spec, state)
    return policy.reserve(model.spec, state, room)  # which counts from here on


def _shared(model: Model, of: Lane | Slots) -> tuple[State, ...]:
    return deduplicate_shared(model.policies, of.states)


def _draw(
    slots: Slots,
    logits: Float32[Array, "S V"],
    active: Bool[Array, " S"],
    scored: Bool[Array, ""] | bool,
) -> tuple[Slots, Told]:
    """The token behind each active row, and the rows that hold it."""
    presence, frequency = slots.penalties[:, :1], slots.penalties[:, 1:]
    counts = slots.counts.astype(jnp.float32)
    wanted = logits + slots.bias - jnp.where(counts > 0, presence, 0) - frequency * counts
    # It stands at `position` once it is fed, and is drawn by where it stands.
    token, _ = draw_each(slots.knobs, wanted, slots.seen, slots.keys, slots.position)
    rows = jnp.arange(token.shape[0])
    marked = slots._replace(
        token=jnp.where(active, token, slots.token),
        seen=slots.seen.at[rows, token].max(active),
        counts=slots.counts.at[rows, token].add(active.astype(jnp.int32)),
    )
    return marked, _tell(logits, token, scored)


def _tell(
    logits: Float32[Array, "N V"], token: Int32[Array, " N"], scored: Bool[Array, ""] | bool
) -> Told:
    """What logits say of these tokens; computed only where somebody asks."""

    def look() -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        best, top = jax.lax.top_k(logprobs, min(TOP, logits.shape[1]))
        own = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return own, top.astype(jnp.int32), best

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(look))
    own, top, best = jax.lax.cond(scored, look, lambda: nothing)
    return Told(token, own, top, best, jnp.isfinite(jnp.max(logits, axis=1)))


@functools.cache
def compilations() -> Counter[str]:
    """How often this process has compiled anything since it was first asked."""
    counted: Counter[str] = Counter()

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted["all"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counted


class Programs:
    """Every program of one engine, compiled for its shapes; what is not among them cannot run.

    room: tokens of a row, prompt and answer. chunks: widths a piece of prompt is padded to, the
    last of them the grid. made: their number. Raises UserError where slots do not fit into memory.
    """

    def __init__(self, model: Model, count: int, room: int, chunks: Sequence[int]) -> None:
        self.model, self.chunks = model, tuple(chunks)
        self.weights = model.weights
        zero, one = np.int32(0), np.uint32(0)
        lane = jax.eval_shape(lambda: begin(model, room, jnp.uint32(0)))
        slots = jax.eval_shape(lambda: empty(model, count, room))
        asked = Asked(
            np.zeros(1, "u4"), np.zeros(1, "u4"),
            Knobs(*(np.zeros(1, dtype) for dtype in ("f4", "i4", "f4", "f4", "f4"))),
            np.zeros((1, model.vocab), bool), np.zeros((1, 2), "f4"),
            np.zeros((1, model.vocab), "f4"),
        )  # fmt: skip
        self.lane, self.made = lane, 0
        self.lane_bytes = batch.nbytes(lane)
        memory.check(  # before minutes of compiling
            batch.nbytes(slots) + self.lane_bytes, f"{count} slots and a lane for {room} tokens"
        )
        self.empty = self.compile(lambda: empty(model, count, room))
        self.begin = self.compile(partial(begin, model, room), np.uint32(0))
        self.reads = {
            (width, scored): self.compile(
                partial(read, model, scored), model.weights, lane, np.zeros((1, width), "i4"),
                one, zero, donate=1,
            )
            for width in self.chunks for scored in (False, True)
        }  # fmt: skip
        self.place = self.compile(partial(place, model, room), slots, zero, lane, asked, donate=0)
        self.decode = self.compile(
            partial(decode, model), model.weights, slots, np.zeros(count, bool), np.bool_(False),
            donate=1,
        )  # fmt: skip

    def compile(self, function: Callable, *shapes: Any, donate: int | None = None) -> Callable:
        """One more program, for arguments of these shapes; donate: the one that it may use up."""
        self.made += 1
        donated = () if donate is None else (donate,)
        return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()
