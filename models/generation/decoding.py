"""The compiled programs of a `Stream`: prefill of one chunk, decoding of one block of tokens.

`prefill_chunk` processes one chunk of the prompts. `decode_block` is one while_loop over tokens.
`generate` and `stream` run the same `decode_block` with different limits, so they share one
compilation and give the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxkv.contract import Policy, Spec, State
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import Decoder, Weights, layer_weights, run_layer, step_on
from jaxkv.platform import cpu as xla_cpu
from jaxkv.sampling import Filters, Knobs, draw
from jaxkv.state import sharding
from jaxkv.state.shared import deduplicate_shared, without_shared
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

BLOCK = 256  # most tokens that one call of `decode_block` returns


class Decoding(NamedTuple):
    """A batch in progress. The states contain every token emitted so far except an eos."""

    states: tuple[State, ...]
    logits: Float32[Array, "B V"]  # of the next token
    position: UInt32[Array, " B"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"]  # tokens of the sequence, for the repetition penalty
    rng: UInt32[Array, "B 2"]  # key data, for sampling tokens


class Static(NamedTuple):
    """The static arguments of the compiled programs.

    shared_once: decoding carries arrays that layers share once (`xla_gpu.carries_shared_once`).
    """

    config: Config
    policies: tuple[Policy, ...]
    mesh: Mesh | None
    shared_once: bool = True

    @property
    def programs(self) -> tuple[Policy, ...]:
        """The policy of each layer in its compiled programs, which layers share."""
        return tuple(policy.program for policy in self.policies)

    @property
    def of_model(self) -> Static:
        """The static arguments of programs without a cache, so that all policies share them."""
        return self._replace(policies=())


def _run_decoder(
    static: Static, weights: Weights, tokens: Array, positions: Array, valid: Array, states: tuple
) -> tuple[Decoder, Array, tuple[State, ...]]:
    decoder = Decoder(static.config, weights, static.mesh)
    hidden, states = decoder(tokens, positions, valid, static.programs, states)
    return decoder, hidden, states


def prefill_chunk(
    static: Static,
    weights: Weights,
    decoding: Decoding,
    tokens: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Decoding:
    """Process one chunk of the prompts; a sequence without a valid token stays unchanged."""
    positions = positions_of(decoding.position, valid)
    x, states = run_layers(static, weights, tokens, positions, valid, decoding.states)
    empty = decoding._replace(states=())
    return end_chunk(static.of_model, weights, empty, x, tokens, valid)._replace(states=states)


def run_layers(
    static: Static,
    weights: Weights,
    tokens: Int32[Array, "B T"],
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
    states: Sequence[State],
) -> tuple[Float[Array, "B T D"], tuple[State, ...]]:
    """The output of the last layer and the new states; the old states are donated.

    Each layer is a call of its own, so the program of a chunk is compiled once for all layers with
    one policy (`Policy.program`), and not once per layer.
    """
    x, new = embed(static.of_model, weights, tokens), []
    for layer, (policy, state) in enumerate(zip(static.programs, states, strict=True)):
        x, state = run_donated(
            of_layer(static.config, layer),
            policy,
            step_on(static.mesh),
            layer_weights(weights, layer),
            x,
            state,
            positions,
            valid,
        )
        new.append(state)
    return x, tuple(new)


def prefill_programs(
    static: Static, weights: Weights, decoding: Decoding, width: int
) -> list[tuple]:
    """The programs that `prefill_chunk` calls for a chunk of `width` tokens, with arguments.

    Arrays may be shapes.
    """
    batch, dtype = decoding.position.shape[0], weights["norm"].dtype
    shape = partial(jax.ShapeDtypeStruct, (batch, width))
    tokens, valid, positions = shape(jnp.int32), shape(jnp.bool_), shape(jnp.uint32)
    x = jax.ShapeDtypeStruct((batch, width, static.config.width), dtype)
    kinds = [
        (of_layer(static.config, layer), policy) for layer, policy in enumerate(static.programs)
    ]
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    layers = [
        (
            run_donated,
            *kind,
            step_on(static.mesh),
            layer_weights(weights, layer),
            x,
            decoding.states[layer],
            positions,
            valid,
        )
        for kind, layer in first.items()
    ]
    return [
        (positions_of, decoding.position, valid),
        (embed, static.of_model, weights, tokens),
        *layers,
        (end_chunk, static.of_model, weights, decoding._replace(states=()), x, tokens, valid),
    ]


run_donated = jax.jit(run_layer, static_argnums=(0, 1, 2), donate_argnums=(4, 5))


@jax.jit
def positions_of(position: UInt32[Array, " B"], valid: Bool[Array, "B T"]) -> UInt32[Array, "B T"]:
    """The positions of a chunk's tokens. position: the position of its first valid token."""
    counts = valid.astype(jnp.uint32)
    return position[:, None] + jnp.cumsum(counts, axis=1) - counts


@partial(jax.jit, static_argnums=0)
def embed(static: Static, weights: Weights, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
    """The input of the first layer."""
    return Decoder(static.config, weights, static.mesh).embedded(tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def end_chunk(
    static: Static,
    weights: Weights,
    decoding: Decoding,
    x: Float[Array, "B T D"],
    tokens: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Decoding:
    """The batch after a chunk, without its states. x: the output of the last layer."""
    decoder = Decoder(static.config, weights, static.mesh)
    new = jnp.sum(valid.astype(jnp.int32), axis=1)
    # Only the last valid token of each sequence needs logits: the head is the largest matrix.
    place = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1])[None, :], 0), axis=1)
    last = decoder.normed(jnp.take_along_axis(x, place[:, None, None], axis=1))
    logits = decoder.logits(last)[:, 0]
    return decoding._replace(
        logits=jnp.where((new > 0)[:, None], logits, decoding.logits),
        position=decoding.position + new.astype(jnp.uint32),
        done=decoding.done & (new == 0),
        seen=_mark(decoding.seen, tokens, valid),
    )


@functools.cache
def compiled_decode_block() -> Callable:
    """`decode_block` under jit, with the compiler options of the present backend."""
    return jax.jit(
        decode_block,
        static_argnums=(0, 1, 2),
        donate_argnums=4,
        compiler_options=xla_cpu.decode_compiler_options(),
    )


def decode_block(
    static: Static,
    filters: Filters,
    eos: tuple[int, ...],
    weights: Weights,
    decoding: Decoding,
    knobs: Knobs,
    limit: Int32[Array, ""],
) -> tuple[Decoding, Int32[Array, "B BLOCK"], Int32[Array, ""], Bool[Array, " B"]]:
    """Generate up to `limit` tokens per sequence.

    Returns the new state; the tokens, with -1 after the end of a sequence; the number of steps; and
    which sequences had finite logits at every step.
    """
    batch = decoding.logits.shape[0]

    def flattened(d: Decoding) -> Decoding:
        return d._replace(states=_carried(static, d.states))

    def restored(d: Decoding) -> Decoding:
        return d._replace(states=_restored(static, d.states, decoding.states))

    def unfinished(carry: tuple) -> Array:
        done, count = carry[0].done, carry[1]
        return (count < limit) & ~jnp.all(done)

    def decode_one(carry: tuple) -> tuple:
        d, (count, out, finite) = restored(carry[0]), carry[1:]
        token, drawn = draw(filters, knobs, d.logits, d.seen, d.rng, d.position)
        finite &= d.done | jnp.isfinite(drawn)
        ends = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(d.done)
        emitted = jnp.where(d.done, -1, token)
        out = jax.lax.dynamic_update_slice(out, emitted[:, None], (0, count))
        fed = ~d.done & ~ends
        decoder, hidden, states = _run_decoder(
            static, weights, token[:, None], d.position[:, None], fed[:, None], d.states
        )
        seen = d.seen
        if filters.repetition:
            seen = _mark(seen, token[:, None], fed[:, None])
        d = Decoding(
            states=states,
            logits=decoder.logits(hidden)[:, 0],
            position=d.position + fed.astype(jnp.uint32),
            done=d.done | ends,
            seen=seen,
            rng=d.rng,
        )
        return flattened(d), count + 1, out, finite

    out, finite = jnp.full((batch, BLOCK), -1, jnp.int32), jnp.ones((batch,), bool)
    start = (flattened(decoding), jnp.int32(0), out, finite)
    end, count, out, finite = jax.lax.while_loop(unfinished, decode_one, start)
    if not filters.repetition:  # no step needs `seen`: mark the whole block at once
        fed = (out >= 0) & ~jnp.isin(out, jnp.asarray(eos, jnp.int32))
        end = end._replace(seen=_mark(end.seen, out, fed))
    return restored(end), out, count, finite


def _carried(static: Static, states: tuple[State, ...]) -> tuple[State, ...]:
    """The states in the form that the loop of a block carries."""
    states = xla_cpu.flatten_heads(states, static.mesh is not None)
    return without_shared(static.programs, states) if static.shared_once else states


def _restored(
    static: Static, states: tuple[State, ...], like: tuple[State, ...]
) -> tuple[State, ...]:
    """The inverse of `_carried`; like: states of the same shapes."""
    if static.shared_once:
        states = deduplicate_shared(static.programs, states)
    return xla_cpu.restore_heads(states, like)


def _mark(seen: Array, tokens: Array, valid: Array) -> Array:
    """Mark the valid tokens [B,T] in seen [B,V], without communication between shards."""
    return jax.vmap(lambda marks, ids, real: marks.at[ids].max(real))(seen, tokens, valid)


def init_layer(policy: Policy, spec: Spec, mesh: Mesh | None, rng: Array) -> State:
    """Initial states of one layer, each from its own rng, so sequences are independent.

    A layer whose policy differs from its `program` is initialised operation by operation: to
    compile a program for each such layer takes longer.
    """
    init = _init_layer if policy.program == policy else _init_layer.__wrapped__
    return init(policy, spec, mesh, rng)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init_layer(policy: Policy, spec: Spec, mesh: Mesh | None, rng: Array) -> State:
    single = jax.vmap(lambda sequence_rng: policy.init(spec, 1, sequence_rng))(rng)
    state = jax.tree.map(lambda leaf: leaf[:, 0], single)
    if mesh is None:
        return state
    specs = sharding.specs(policy.leaves, *sharding.axes_in(mesh))
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        state,
        specs,
    )


@partial(jax.jit, static_argnames=("policy", "spec", "mesh"))
def finish_prefill_layer(policy: Policy, spec: Spec, mesh: Mesh | None, state: State) -> State:
    """Finish the prefill of one layer."""
    if mesh is None:
        return policy.finish_prefill(spec, state)
    return sharding.sharded_finish_prefill(mesh, policy, spec, state)
