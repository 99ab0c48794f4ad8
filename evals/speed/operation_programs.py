"""The operations of a decode step and of a prefill chunk, each of all layers together.

Each is one program, except that the attention of a prefill chunk is a program per layer. It applies
the functions of models/network/decoder.py to the weights of all layers in turn. So it reads as many
weights as a real step does, and the order of layers is kept: the input of a layer depends on the
output of the layer before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.driver import step
from jaxkv.evals.lib.timing import Variant, timed
from jaxkv.models import Sampling, Stream
from jaxkv.models.generation.decoding import Static, _logits_by_sequence
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import xla_cpu
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Decoder, Layer, Weights, layer_weights, rms_norm, spec_of
from jaxkv.sampling import draw
from jaxkv.state.loop_carry import flatten_heads, restore_heads
from jaxkv.typing import Array

Product = Callable[[Layer, Array], tuple[Array, ...]]


def linear(*names: str) -> Product:
    """Products of one feature-major input with some matrices of a layer."""
    return lambda layer, x: tuple(layer._linear(x, name) for name in names)


def heads(*names: str) -> Product:
    """Projections to the heads of queries, keys and values."""
    return lambda layer, x: tuple(layer._heads(x, name) for name in names)


# Products of a layer: row, its matrices, and what it computes from a layer and its input.
PRODUCTS: dict[str, tuple[tuple[str, ...], Product]] = {
    "q, k, v": (("q", "k", "v"), heads("q", "k", "v")),
    "attention output": (("o",), lambda layer, x: (layer._from_heads(x),)),
    "gate, up": (("gate", "up"), linear("gate", "up")),
    "down": (("down",), linear("down")),
}
ATTENTION = "rotation, attention, cache update"
NORMS = "norms, activation, residuals"
NORM_WEIGHTS = ("attn_norm", "mlp_norm")
EMBEDDING, HEAD, SAMPLING = "embedding", "head", "sampling"
# Operations on each element, of which an exponential or a root is one.
NORM, RESIDUAL, ACTIVATION = 4, 1, 5


@dataclass(frozen=True)
class Operation:
    """One row: the program, how often a step has it, what it reads at least, and its arithmetic."""

    run: Variant
    times: int
    flops: float
    weight_bytes: int = 0
    cache_bytes: int = 0


class Caches:
    """A batch in progress, which a stream and the program of attention extend in turn.

    Both donate the caches, so that they are in memory once.
    """

    def __init__(self, stream: Stream, batch: int = 1):
        """Repeat the only sequence of a stream."""
        self.static, self.batch = stream.static, batch
        self.decoding = jax.tree.map(lambda a: jnp.repeat(a, batch, axis=0), stream.decoding)

    def lend(self, stream: Stream, work: Callable[[], object]) -> Variant:
        """`work` of a stream, from where the batch is. The caches that it has are dropped."""
        stream.decoding = self.decoding

        def run() -> float:
            stream.decoding = jax.block_until_ready(self.decoding)
            seconds = timed(lambda: (work(), jax.block_until_ready(stream.decoding)))()
            self.decoding = stream.decoding
            return seconds

        return run


def after(x: Array, *arrays: Array) -> Array:
    """x, which depends on `found`: XLA could otherwise compute several layers at the same time."""
    for y in arrays:
        first = y.reshape(-1)[0].astype(x.dtype)
        x = jnp.where(first != first, first, x)
    return x


def run_products(config: Config, row: str, weights: Sequence[Weights], x: Array) -> Array:
    """One kind of product in all layers."""
    for of_layer in weights:
        x = after(x, *PRODUCTS[row][1](Layer(config, of_layer), x))
    return x


def run_norms(
    config: Config, weights: dict[str, Array], last: Array, x: Array, gate: Array, up: Array
) -> tuple[Array, Array]:
    """What a layer computes between its products; a norm's output stands for that of a product.

    weights: weights of all layers, stacked. A loop keeps XLA from one fusion for several layers.
    """

    def layer(carry: tuple[Array, Array], of_layer: dict[str, Array]) -> tuple:
        x, gate = carry
        for name in NORM_WEIGHTS:
            x = x + rms_norm(x, of_layer[name], config.norm_eps)
        return (x, jax.nn.silu(gate) * up), None

    (x, gate), _ = jax.lax.scan(layer, (x, gate), weights)
    return rms_norm(x, last, config.norm_eps), gate


def attend_in_decoding(
    static: Static, states: tuple[State, ...], q: Array, pairs: Sequence[tuple[Array, Array]],
    positions: Array, valid: Array, steps: Array,
) -> tuple[Array, tuple[State, ...]]:  # fmt: skip
    """The attention of all layers; the output of a layer is the query of the next.

    steps: how often. As in `decode_block`, a loop carries the caches: outside of a loop XLA:CPU
    copies each cache several times.
    """

    def step(carry: tuple) -> tuple:
        (count, q, flat), new = carry, []
        for policy, state, pair in zip(
            static.policies, restore_heads(flat, states), pairs, strict=True
        ):
            q, state = attend_layer(static.config, policy, state, q, pair, positions, valid)
            new.append(state)
        return count + 1, q, flatten_heads(new, sharded=False)

    start = jnp.int32(0), q, flatten_heads(states, sharded=False)
    _, q, flat = jax.lax.while_loop(lambda carry: carry[0] < steps, step, start)
    return q, restore_heads(flat, states)


def attend_in_prefill(
    static: Static, states: tuple[State, ...], q: Array, pairs: Sequence[tuple[Array, Array]],
    positions: Array, valid: Array,
) -> tuple[Array, tuple[State, ...]]:  # fmt: skip
    """The same of a prefill chunk: a call for each layer, as in `decoding.run_layers`."""
    program, new = compiled(attend_layer, (0, 1), (2,), prefill=True), []
    for policy, state, pair in zip(static.policies, states, pairs, strict=True):
        q, state = program(static.config, policy, state, q, pair, positions, valid)
        new.append(state)
    return q, tuple(new)


def attend_layer(
    config: Config, policy: Policy, state: State, q: Array, pair: tuple[Array, Array],
    positions: Array, valid: Array,
) -> tuple[Array, State]:  # fmt: skip
    """The attention of one layer to its cache and the new keys and values, which it stores."""
    spec = spec_of(config, str(q.dtype))
    out, state = step(policy, spec, state, q, *pair, positions, valid)
    return out.astype(q.dtype), state


def run_embedding(config: Config, weights: Weights, tokens: Array) -> Array:
    """The input of the first layer."""
    return Decoder(config, weights).embedded(tokens)


def run_head(config: Config, weights: Weights, hidden: Array) -> Array:
    """The logits of one token per sequence."""
    return _logits_by_sequence(Decoder(config, weights), hidden)


@functools.cache
def compiled(program: Callable, static: tuple[int, ...], donate: tuple[int, ...] = (),
             prefill: bool = False) -> Callable:  # fmt: skip
    """A program under jit, with the compiler options of prefill or of decoding."""
    options = {} if prefill else xla_cpu.decode_compiler_options()
    return jax.jit(program, static_argnums=static, donate_argnums=donate,
                   compiler_options=options)  # fmt: skip


def operations(llm: Llm, caches: Caches, tokens: int) -> dict[str, Operation]:
    """The rows of a step of `tokens` tokens per sequence: 1 in decoding, else a prefill chunk."""
    prefill = tokens > 1
    rows = products(llm, caches.batch, tokens)
    rows[HEAD] = head(llm, caches.batch)
    rows[ATTENTION] = attention(llm, caches, tokens)
    rows[NORMS] = norms(llm, caches.batch, tokens)
    rows[EMBEDDING] = embedding(llm, caches.batch, tokens)
    return rows if prefill else rows | {SAMPLING: sampling(llm, caches)}


def products(llm: Llm, batch: int, tokens: int) -> dict[str, Operation]:
    """The products of the layers."""
    config, rows = llm.config, {}
    inputs = {name: (config.width, batch, tokens) for name in PRODUCTS}
    inputs["attention output"] = (batch, tokens, config.heads, config.head_dim)
    inputs["down"] = (config.mlp, batch, tokens)
    for row, (names, _) in PRODUCTS.items():
        weights = chosen(llm, names)
        matrices = sum(math.prod(of_layer[name].shape) for of_layer in weights for name in names)
        rows[row] = Operation(
            call(compiled(run_products, (0, 1), prefill=tokens > 1), config, row, weights,
                 normal(llm, inputs[row])),
            config.layers, 2 * matrices * batch * tokens, weight_bytes=nbytes(weights),
        )  # fmt: skip
    return rows


def norms(llm: Llm, batch: int, tokens: int) -> Operation:
    """Norms, the activation of the MLP, and residual sums."""
    config, last = llm.config, llm.weights["norm"]
    of_layers = chosen(llm, NORM_WEIGHTS)
    weights = {
        name: jnp.stack([layer_weights[name] for layer_weights in of_layers])
        for name in NORM_WEIGHTS
    }
    x, gate = (normal(llm, (wide, batch, tokens)) for wide in (config.width, config.mlp))
    up = jnp.full_like(gate, 2)  # keeps the activations of later layers in a usual range
    per_layer = config.width * 2 * (NORM + RESIDUAL) + config.mlp * ACTIVATION
    return Operation(
        call(compiled(run_norms, (0,), prefill=tokens > 1), config, weights, last, x, gate, up),
        config.layers, (config.layers * per_layer + NORM * config.width) * batch * tokens,
        weight_bytes=nbytes((weights, last)),
    )  # fmt: skip


def attention(llm: Llm, caches: Caches, tokens: int) -> Operation:
    """Attention; its arithmetic is that of as many keys per query as the cache has slots."""
    config, batch = llm.config, caches.batch
    q = normal(llm, (batch, tokens, config.heads, config.head_dim))
    pairs = [tuple(normal(llm, (batch, tokens, config.kv_heads, config.head_dim), 2 * layer + seed)
                   for seed in (1, 2)) for layer in range(config.layers)]  # fmt: skip
    program, extra_arguments = attend_in_prefill, ()
    if tokens == 1:
        program, extra_arguments = compiled(attend_in_decoding, (0,), (1,)), (np.int32(1),)
    valid, count = jnp.ones((batch, tokens), bool), jnp.arange(tokens, dtype=jnp.uint32)

    def run() -> float:
        decoding = caches.decoding
        positions = jax.block_until_ready(decoding.position[:, None] + count[None])
        start = perf_counter()
        _, states = jax.block_until_ready(
            program(caches.static, decoding.states, q, pairs, positions, valid, *extra_arguments)
        )
        seconds = perf_counter() - start
        caches.decoding = decoding._replace(states=states)
        return seconds

    keys = sum(state.positions.shape[1] for state in caches.decoding.states)
    flops = 4 * config.heads * config.head_dim * batch * tokens * keys
    return Operation(run, config.layers, flops, cache_bytes=nbytes(caches.decoding.states))


def embedding(llm: Llm, batch: int, tokens: int) -> Operation:
    """The rows of the embedding."""
    ids = jax.random.randint(jax.random.key(0), (batch, tokens), 0, llm.config.vocab)
    weights = first_layer(llm)
    read = nbytes(weights["embed"]) // llm.config.vocab * batch * tokens
    program = compiled(run_embedding, (0,), prefill=tokens > 1)
    return Operation(call(program, one_layer(llm), weights, ids), 1, 0, weight_bytes=read)


def head(llm: Llm, batch: int) -> Operation:
    """The logits of one token per sequence; a prefill chunk has them of its last token."""
    hidden, weights = normal(llm, (llm.config.width, batch, 1)), first_layer(llm)
    weight = weights["embed" if llm.config.tied else "head"]
    run = call(compiled(run_head, (0,)), one_layer(llm), weights, hidden)
    return Operation(run, 1, 2 * math.prod(weight.shape) * batch, weight_bytes=nbytes(weight))


def sampling(llm: Llm, caches: Caches) -> Operation:
    """Greedy sampling: the maximum of the logits, and its place."""
    settings, decoding = Sampling(), caches.decoding
    run = call(compiled(draw, (0,)), settings.filters, settings.knobs,
               normal(llm, decoding.logits.shape), *map(jnp.copy, (decoding.seen, decoding.rng,
               decoding.position)))  # fmt: skip
    return Operation(run, 1, 2 * decoding.logits.size)


def call(program: Callable, *arguments: Any) -> Variant:
    """A call of a compiled program, up to its result."""
    return timed(lambda: jax.block_until_ready(program(*arguments)))


def chosen(llm: Llm, names: Sequence[str]) -> list[dict[str, Any]]:
    """Some weights of each layer, with their biases, by name."""
    names = {*names, *(f"{name}_bias" for name in names)}
    every = (layer_weights(llm.weights, layer) for layer in range(llm.config.layers))
    return [{name: weights[name] for name in weights if name in names} for weights in every]


def one_layer(llm: Llm) -> Config:
    """The model with its first layer only: the decoder of few arguments."""
    return replace(llm.config, layers=1, windows=llm.config.windows[:1])


def first_layer(llm: Llm) -> dict[str, Any]:
    """The weights of `one_layer`."""
    return {name: weight for name, weight in llm.weights.items()
            if not name.startswith("layers.") or name.startswith("layers.0.")}  # fmt: skip


def normal(llm: Llm, shape: Sequence[int], seed: int = 0) -> Array:
    """Random activations."""
    return jax.random.normal(jax.random.key(seed), shape, llm.weights["norm"].dtype)


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
