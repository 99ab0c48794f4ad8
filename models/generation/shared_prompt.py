"""Prefill one prompt under several policies that attend exactly until the end of prefill.

All of them see the queries, keys and values of full attention. So one policy computes these, layer
by layer, and every policy absorbs them. Only one layer at a time has its uncompressed caches in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, Spec, State
from jaxkv.driver import step
from jaxkv.models.generation.decoding import embed, finish_prefill_layer
from jaxkv.models.generation.streams import Stream
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import Weights, layer_weights, run_layer
from jaxkv.policies import Full
from jaxkv.typing import Array, Bool, Float, UInt32

CHUNK = 1024  # tokens of a prompt in one call


class AttentionInputs(NamedTuple):
    """The arguments of `step` in one layer for one chunk."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    positions: UInt32[Array, "B T"]
    valid: Bool[Array, "B T"]


def join(chunks: Sequence[AttentionInputs]) -> AttentionInputs:
    """The inputs of consecutive chunks as those of one."""
    return AttentionInputs(*(jnp.concatenate(x, axis=1) for x in zip(*chunks, strict=True)))


def attends_exactly(policies: Sequence[Policy]) -> bool:
    """Whether attention within a prompt is full attention, in every layer."""
    return all(
        (policy.min_prompt is not None or isinstance(policy, Full))
        and getattr(policy, "storage", "float") == "float"
        for policy in policies
    )


def prefill(streams: Sequence[Stream], prompt: Sequence[int]) -> Iterator[int]:
    """Prefill new streams of one sequence with the same prompt and finish prefill, layer by layer.

    streams: streams of one model without a mesh, under policies that attend exactly. Yields each
    layer that is done; the streams are prefilled when the iterator ends.
    """
    leader, ids = streams[0], np.asarray([prompt], np.int32)
    llm, size = leader.llm, len(prompt)
    parts = [slice(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK)]
    start = leader.decoding.position
    positions = start[:, None] + jnp.arange(size, dtype=jnp.uint32)[None]
    valid = jnp.ones((1, size), bool)
    x = [embed(leader.static.of_model, llm.weights, ids[:, part]) for part in parts]
    states = [list(stream.decoding.states) for stream in streams]
    before = int(leader.lengths[0])
    programs = [stream.static.programs for stream in streams]
    for layer in range(llm.config.layers):
        for of_layers, of_stream in zip(programs, states, strict=True):
            policy = of_layers[layer]
            if policy.grows:
                of_stream[layer] = policy.reserve(llm.spec, of_stream[layer], tokens=before + size)
        weights = layer_weights(llm.weights, layer)
        for number, part in enumerate(parts):
            x[number], states[0][layer], inputs = run_recorded(
                of_layer(llm.config, layer),
                programs[0][layer],
                weights,
                x[number],
                states[0][layer],
                positions[:, part],
                valid[:, part],
            )
            for of_layers, of_stream in zip(programs[1:], states[1:], strict=True):
                policy = of_layers[layer]
                of_stream[layer] = absorb(policy, llm.specs[layer], of_stream[layer], inputs)
        for of_layers, of_stream in zip(programs, states, strict=True):
            policy = of_layers[layer]
            if policy.min_prompt is not None:
                spec = llm.specs[layer]
                of_stream[layer] = finish_prefill_layer(policy, spec, None, of_stream[layer])
        jax.block_until_ready(x)
        yield layer
    for stream, of_stream in zip(streams, states, strict=True):
        stream.lengths = stream.lengths + size
        if any(policy.min_prompt is not None for policy in stream.policies):
            stream.prompt_lengths, stream.prefill_finished = stream.lengths, True
        position = start + np.uint32(size)
        stream.decoding = stream.decoding._replace(states=tuple(of_stream), position=position)


def programs(streams: Sequence[Stream], size: int) -> Iterator[tuple[Callable, tuple[object, ...]]]:
    """The programs that `prefill` calls for a prompt of `size` tokens, with shapes of arguments."""
    leader = streams[0]
    llm = leader.llm
    widths = sorted({min(CHUNK, size - at) for at in range(0, size, CHUNK)}, reverse=True)
    states = [stream.states_for(size)[0] for stream in streams]
    policies = [stream.static.programs for stream in streams]
    for width in widths:
        shape = partial(jax.ShapeDtypeStruct, (1, width))
        places = shape(jnp.uint32), shape(jnp.bool_)
        yield embed, (leader.static.of_model, llm.weights, shape(jnp.int32))
        x = jax.ShapeDtypeStruct((1, width, llm.config.width), llm.weights["norm"].dtype)
        listed = set()
        for layer, layer_states in enumerate(zip(*states, strict=True)):
            weights = layer_weights(llm.weights, layer)
            static, spec = (of_layer(llm.config, layer), policies[0][layer]), llm.specs[layer]
            arrays = weights, x, layer_states[0], *places
            inputs = jax.eval_shape(partial(_run_recorded, *static), *arrays)[2]
            for number, of_stream in enumerate(policies):
                policy = of_stream[layer]
                if (number, policy, spec) in listed:
                    continue
                listed.add((number, policy, spec))
                if number == 0:
                    yield run_recorded, (*static, *arrays)
                else:
                    yield absorb, (policy, spec, layer_states[number], inputs)
    for of_layers, of_stream in zip(policies, states, strict=True):
        kinds = list(zip(of_layers, llm.specs, strict=True))
        for policy, spec in dict.fromkeys(kinds):
            if policy.min_prompt is not None:
                state = of_stream[kinds.index((policy, spec))]
                yield finish_prefill_layer, (policy, spec, None, state)


def _run_recorded(
    config: Config,
    policy: Policy,
    weights: Weights,
    x: Float[Array, "B T D"],
    state: State,
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T D"], State, AttentionInputs]:
    """One layer with its cache, and the inputs of its attention."""

    def record(policy: Policy, spec: Spec, state: State, *new: Array) -> tuple[Array, tuple]:
        out, state = step(policy, spec, state, *new)
        return out, (state, AttentionInputs(*new[:5]))

    x, (state, inputs) = run_layer(config, policy, record, weights, x, state, positions, valid)
    return x, state, inputs


run_recorded = jax.jit(_run_recorded, static_argnums=(0, 1), donate_argnums=(3, 4))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def absorb(policy: Policy, spec: Spec, state: State, inputs: AttentionInputs) -> State:
    """The state of one layer after a chunk; XLA drops its attention, which nothing uses."""
    return step(policy, spec, state, *inputs)[1]
