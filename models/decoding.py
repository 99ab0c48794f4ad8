"""What is compiled of a stream: a chunk of a prompt read, a block of tokens written.

Two functions do all the work. `read_chunk` takes a chunk of prompt; `write_block` is one
while_loop over tokens. A whole answer and a stream run the same `write_block`, only with different
limits, so they deduplicate_shared one compilation and give the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxkv.contract import Policy, Spec, State
from jaxkv.models.compilation import small_steps
from jaxkv.models.config import Config
from jaxkv.models.decoder import Decoder, Weights
from jaxkv.sampling import Filters, Knobs, draw
from jaxkv.state import sharding
from jaxkv.state.loop_carry import deduplicate_shared, flatten_heads, restore_heads
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

BLOCK = 256  # tokens one call of `write_block` can return


class Decoding(NamedTuple):
    """A batch in progress. The states have absorbed every token emitted so far but an eos."""

    states: tuple[State, ...]
    logits: Float32[Array, "B V"]  # of the token that comes next
    position: UInt32[Array, " B"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"]  # tokens of the row, for the repetition penalty
    keys: UInt32[Array, "B 2"]


class Static(NamedTuple):
    """What a compilation depends on besides shapes."""

    config: Config
    policies: tuple[Policy, ...]
    mesh: Mesh | None


def _decode(
    static: Static, weights: Weights, tokens: Array, positions: Array, valid: Array, states: tuple
) -> tuple[Decoder, Array, tuple[State, ...]]:
    decoder = Decoder(static.config, weights, static.mesh)
    hidden, states = decoder(tokens, positions, valid, static.policies, states)
    return decoder, hidden, states


def _by_row(decoder: Decoder, hidden: Float[Array, "D B 1"]) -> Float32[Array, "B V"]:
    # Unbarred, XLA folds the transpose into the product, and on a CPU fails on it in bfloat16.
    return jax.lax.optimization_barrier(decoder.logits(hidden))[:, :, 0].T


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def read_chunk(
    static: Static,
    weights: Weights,
    decoding: Decoding,
    tokens: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Decoding:
    """Absorb a chunk of prompt; rows that are all padding keep everything as it was."""
    offset = jnp.cumsum(valid.astype(jnp.uint32), axis=1) - valid.astype(jnp.uint32)
    positions = decoding.position[:, None] + offset
    states = deduplicate_shared(static.policies, decoding.states)
    decoder, hidden, states = _decode(static, weights, tokens, positions, valid, states)
    new = jnp.sum(valid.astype(jnp.int32), axis=1)
    # The last valid place of each row: the head is applied there and nowhere else.
    place = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1])[None, :], 0), axis=1)
    last = jnp.take_along_axis(hidden, place[None, :, None], axis=2)
    logits = _by_row(decoder, last)
    return decoding._replace(
        states=states,
        logits=jnp.where((new > 0)[:, None], logits, decoding.logits),
        position=decoding.position + new.astype(jnp.uint32),
        done=decoding.done & (new == 0),
        seen=_mark(decoding.seen, tokens, valid),
    )


@functools.cache
def writer() -> Callable:
    """`write_block`, compiled for where it runs."""
    return jax.jit(
        write_block, static_argnums=(0, 1, 2), donate_argnums=4, compiler_options=small_steps()
    )


def write_block(
    static: Static,
    filters: Filters,
    eos: tuple[int, ...],
    weights: Weights,
    decoding: Decoding,
    knobs: Knobs,
    limit: Int32[Array, ""],
) -> tuple[Decoding, Int32[Array, "B BLOCK"], Int32[Array, ""], Bool[Array, " B"]]:
    """Up to `limit` tokens a row, -1 after a row's end; how many steps; which rows had numbers."""
    rows = decoding.logits.shape[0]

    def folded(d: Decoding) -> Decoding:
        return d._replace(states=flatten_heads(static.policies, d.states, static.mesh is not None))

    def unfolded(d: Decoding) -> Decoding:
        return d._replace(states=restore_heads(static.policies, d.states, decoding.states))

    def go_on(carry: tuple) -> Array:
        done, count = carry[0].done, carry[1]
        return (count < limit) & ~jnp.all(done)

    def write_one(carry: tuple) -> tuple:
        d, (count, out, sound) = unfolded(carry[0]), carry[1:]
        token, drawn = draw(filters, knobs, d.logits, d.seen, d.keys, d.position)
        sound &= d.done | jnp.isfinite(drawn)
        ends = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(d.done)
        emitted = jnp.where(d.done, -1, token)
        out = jax.lax.dynamic_update_slice(out, emitted[:, None], (0, count))
        fed = ~d.done & ~ends
        decoder, hidden, states = _decode(
            static, weights, token[:, None], d.position[:, None], fed[:, None], d.states
        )
        seen = d.seen
        if filters.repetition:
            seen = _mark(seen, token[:, None], fed[:, None])
        d = Decoding(
            states=states,
            logits=_by_row(decoder, hidden),
            position=d.position + fed.astype(jnp.uint32),
            done=d.done | ends,
            seen=seen,
            keys=d.keys,
        )
        return folded(d), count + 1, out, sound

    out, sound = jnp.full((rows, BLOCK), -1, jnp.int32), jnp.ones((rows,), bool)
    start = (folded(decoding), jnp.int32(0), out, sound)
    end, count, out, sound = jax.lax.while_loop(go_on, write_one, start)
    if not filters.repetition:  # nobody asked on the way: mark the whole block at once
        fed = (out >= 0) & ~jnp.isin(out, jnp.asarray(eos, jnp.int32))
        end = end._replace(seen=_mark(end.seen, out, fed))
    return unfolded(end), out, count, sound


def _mark(seen: Array, tokens: Array, valid: Array) -> Array:
    """seen [B,V] with the valid tokens [B,T] marked; row by row, so that shards need not talk."""
    return jax.vmap(lambda row, ids, real: row.at[ids].max(real))(seen, tokens, valid)


@partial(jax.jit, static_argnums=(0, 1, 2))
def init_layer(policy: Policy, spec: Spec, mesh: Mesh | None, keys: Array) -> State:
    """Fresh rows, each from its own key: a row's randomness does not know its neighbours."""
    rows = jax.vmap(lambda key: policy.init(spec, 1, key))(keys)
    state = jax.tree.map(lambda leaf: leaf[:, 0], rows)
    if mesh is None:
        return state
    specs = sharding.specs(policy.leaves, *sharding.axes_in(mesh))
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        state,
        specs,
    )


@partial(jax.jit, static_argnames=("policy", "spec", "mesh"))
def seal_layer(policy: Policy, spec: Spec, mesh: Mesh | None, state: State) -> State:
    if mesh is None:
        return policy.finish_prefill(spec, state)
    return sharding.sharded_finish_prefill(mesh, policy, spec, state)
