"""The programs in which workarounds for XLA:CPU are measured, at the sizes of SmolLM2-135M.

A program is made once, and compiled once with all workarounds and once without each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib import hlo
from jaxkv.evals.lib.timing import prompt
from jaxkv.models.generation.decoding import decode_block
from jaxkv.models.generation.serving import make_model
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import xla_cpu as models_xla_cpu
from jaxkv.models.network.decoder import layer_weights, run_layer
from jaxkv.models.training import training
from jaxkv.models.training.pretrain import setting_for
from jaxkv.models.training.recipes import PRESETS, Recipe
from jaxkv.models.training.training import TrainingSetting
from jaxkv.pallas_kernels.sampled_attention import LogitSettings, reference, shapes
from jaxkv.platform import cpu as xla_cpu
from jaxkv.policies.magicpig import hash_tables
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import programs
from jaxkv.serve.engine.model import forward as run_forward
from jaxkv.typing import Array, Int32

LOADED: dict[str, tuple[Any, ...]] = {  # arguments of `models.load`
    "float32": (smollm2.NAME, "float32"),
    "int8": (smollm2.NAME, "float32", None, None, "int8"),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of all programs.

    small, large: tokens in a cache. steps: tokens per call. keys, bits, tables: sizes of an LSH
    index. sequences: number whose logits one argmax reads. recipe, vocab: settings of training.
    """

    small: int = 256
    large: int = 1024
    steps: int = 8
    keys: int = 32_768
    bits: int = 10
    tables: int = 150
    sequences: int = 64
    recipe: Recipe = PRESETS["tiny"]
    vocab: int = 4096


@dataclass(frozen=True)
class Program:
    """A function that is compiled and timed.

    about: what it computes. args, options: make its arguments and compiler options, with the
    workarounds of the form that is compiled. donate: the argument that the first result replaces;
    its buffers are reused. calls: how often one measurement calls it. steps: steps of each call, by
    which the time is divided. cached: sizes of arrays whose copies `copies` finds.
    """

    about: str
    function: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    donate: int | None = None
    calls: int = 1
    steps: int = 1
    options: Callable[[], dict[str, object]] = dict
    cached: frozenset[int] = frozenset()
    copies: Callable[[str, frozenset[int]], list[str]] = hlo.copies_in_loops


LoadModel = Callable[[str], Llm]  # of LOADED


def policies(slots: int) -> dict[str, str]:
    """Policies that cache or attend to about `slots` tokens."""
    half, block = slots // 2, min(64, slots // 8)
    tree = f"sinks=4,window={slots - 4 - 2 * block},levels=3,block={block}"
    return {
        "streaming": f"streaming:sinks=4,window={slots - 4}",
        "reservoir": f"reservoir:sinks=4,window={half - 4},sample={slots - half}",
        "balance-stream": f"balance-stream:{tree}",
        "magicpig": "magicpig",
        "full": "full",
    }


def decode(
    load: LoadModel,
    sizes: Sizes,
    policy: str,
    slots: str,
    weights: str = "float32",
    fields: str = "",
) -> Program:
    """The decode loop of one sequence whose cache is full. slots: small or large."""
    tokens = getattr(sizes, slots)
    llm, spec = load(weights), policies(tokens)[policy] + fields
    stream = models.Stream(llm, spec, tokens=tokens + 1 + sizes.steps)
    stream.prefill([prompt(llm, tokens + 1)])
    stream.finish_prefill()
    stream.reserve(sizes.steps)
    static, filters, eos, *args = stream.decode_arguments(
        stream.decoding, Sampling(), (), sizes.steps
    )
    states = jax.tree.leaves(stream.decoding.states)
    return Program(
        f"decode, {spec}, {tokens:,} tokens, {llm.config.layers} layers, weights in {weights}",
        partial(decode_block, static, filters, eos),
        lambda: tuple(args),
        donate=1,
        steps=sizes.steps,
        options=lambda: models_xla_cpu.decode_compiler_options(),
        cached=frozenset(leaf.size for leaf in states if leaf.ndim >= 4),
    )


def prefill(load: LoadModel, sizes: Sizes) -> Program:
    """A chunk through one layer whose cache is full."""
    llm, slots = load("float32"), sizes.large
    spec = policies(slots)["streaming"]
    policy = llm.policies(spec)[0]
    state = policy.init(llm.spec, 1, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (llm.config.width, 1, slots), llm.dtype)
    run = partial(run_layer, llm.config, policy, None, layer_weights(llm.weights, 0), x)
    valid = jnp.ones((1, slots), bool)
    at = jnp.arange(slots, dtype=jnp.uint32)[None]
    _, full = jax.jit(run)(state, at, valid)

    def chunk(weights: dict[str, Array], x: Array, *state_and_positions: Any) -> Any:
        return run_layer(llm.config, policy, None, weights, x, *state_and_positions)

    args = layer_weights(llm.weights, 0), x, full, at + np.uint32(slots), valid
    about = f"prefill, {spec}, {slots:,} tokens in the cache and in the chunk, 1 layer"
    return Program(about, chunk, lambda: args)


def forward(load: LoadModel, sizes: Sizes) -> Program:
    """A chunk through all layers in one program, with an empty cache."""
    llm, tokens = load("float32"), sizes.large
    spec = policies(tokens)["streaming"]
    model = make_model(llm, spec)
    states = tuple(policy.init(model.spec, 1, jax.random.key(0)) for policy in model.policies)
    ids = jnp.asarray([prompt(llm, tokens)], jnp.int32)
    at, valid = jnp.arange(tokens, dtype=jnp.uint32)[None], jnp.ones((1, tokens), bool)
    last = jnp.full((1, 1), tokens - 1, jnp.int32)

    def chunk(weights: Any, states: Any, ids: Array) -> Any:
        logits, states = run_forward(model, weights, ids, at, valid, states, last)
        return states, logits

    about = f"forward, {spec}, a chunk of {tokens:,} tokens, {llm.config.layers} layers"
    return Program(about, chunk, lambda: (model.weights, states, ids), donate=1)


def engine(load: LoadModel, sizes: Sizes) -> Program:
    """A decode step of the engine for one sequence under full attention."""
    llm, slots = load("float32"), sizes.large
    model = make_model(llm, "full")
    like = jax.eval_shape(lambda: programs.empty_batch(model, 1, slots))

    def step(weights: Any, batch: Any, active: Array, scored: Array) -> Any:
        return programs.decode(model, like, weights, batch, active, scored)

    def args() -> tuple[Any, ...]:
        batch = programs.carry(programs.empty_batch(model, 1, slots))
        return model.weights, batch, np.ones(1, bool), np.bool_(False)

    caches = (leaf.size for leaf in jax.tree.leaves(like.states) if leaf.ndim >= 4)
    about = f"engine decode, full, 1 sequence of up to {slots:,} tokens, {llm.config.layers} layers"
    return Program(about, step, args, donate=1, calls=sizes.steps, cached=frozenset(caches),
                   copies=hlo.copies)  # fmt: skip


def argmax(load: LoadModel, sizes: Sizes) -> Program:
    """Greedy tokens of a batch."""
    shape = sizes.sequences, load("float32").config.vocab
    logits = jax.random.normal(jax.random.key(0), shape)
    about = f"greedy tokens of {shape[0]} sequences, {shape[1]:,} logits each"
    return Program(about, lambda x: xla_cpu.argmax(x), lambda: (logits,), calls=8)


def lookup(_: LoadModel, sizes: Sizes) -> Program:
    """The keys that three query heads find in the tables of their KV head."""
    tables = jax.jit(partial(hash_tables.build, bits=sizes.bits))(
        random_codes(sizes), jnp.ones(sizes.keys, bool)
    )
    batched_tables = jax.tree.map(lambda leaf: leaf[None, None], tables)
    random = np.random.default_rng(1)
    queries = random.integers(0, 1 << sizes.bits, (3, sizes.tables)).astype(np.int32)
    max_selected = min(4096, sizes.keys)

    def find(
        tables: hash_tables.Tables, queries: Int32[Array, "N L"]
    ) -> tuple[Int32[Array, "N M"], Int32[Array, " N"]]:
        def select(code: Array) -> tuple[Array, Array]:
            words = hash_tables.tally(tables, jnp.int32(0), code, sizes.keys, 2)
            selected = hash_tables.select(words, max_selected, jnp.float32(0.5))
            return selected.places, selected.count

        return jax.lax.map(select, queries)

    about = f"magicpig, lookup of 3 queries among {sizes.keys:,} keys, {sizes.tables} tables"
    return Program(
        about, find, lambda: (batched_tables, jnp.asarray(queries)), calls=8 * sizes.steps
    )


def index(_: LoadModel, sizes: Sizes) -> Program:
    """The hash tables of one KV head."""
    codes, valid = random_codes(sizes), jnp.ones(sizes.keys, bool)
    about = f"magicpig, tables of {sizes.keys:,} keys, {sizes.tables} tables"
    build = lambda codes, valid: hash_tables.build(codes, valid, sizes.bits)  # noqa: E731
    return Program(about, build, lambda: (codes, valid))


def random_codes(sizes: Sizes) -> Int32[Array, "L S"]:
    random = np.random.default_rng(0)
    codes = random.integers(0, 1 << sizes.bits, (sizes.tables, sizes.keys))
    return jnp.asarray(codes, jnp.int32)


def sampled(load: LoadModel, sizes: Sizes, dtype: str) -> Program:
    """Attention of one token to sampled keys, as magicpig attends."""
    config = load("float32").config
    shape = shapes.AttentionBenchShape(
        1, config.heads, config.kv_heads, sizes.keys, config.head_dim,
        int(1.5 * shapes.SAMPLED * sizes.keys), dtype,
    )  # fmt: skip
    args = shapes.inputs(shape, "log", fraction=shapes.SAMPLED)
    settings = LogitSettings(config.head_dim**-0.5)
    about = f"sampled attention to {shapes.SAMPLED:.0%} of {sizes.keys:,} keys in {dtype}"
    attend = lambda *args: reference.attend(settings, *args)  # noqa: E731
    return Program(about, attend, lambda: args, calls=4 * sizes.steps)


def train(_: LoadModel, sizes: Sizes) -> Program:
    """One training step on random tokens."""
    recipe = sizes.recipe
    setting: TrainingSetting = setting_for(recipe, sizes.vocab, (), 0)
    random = np.random.default_rng(0)
    runs = random.integers(3, sizes.vocab, (recipe.batch_size, recipe.context + 1)).astype(np.int32)
    args = training.begin(setting), setting.split(runs)
    # Without its jit, whose trace would outlive the form.
    step = lambda *args: training.update.__wrapped__(setting, *args)  # noqa: E731
    about = (f"training step, {recipe.layers} layers of width {recipe.width}, vocabulary of "
             f"{sizes.vocab:,}, {recipe.batch_size} samples of {recipe.context} "
             "tokens")  # fmt: skip
    return Program(about, step, lambda: args, donate=0)


PROGRAMS: Mapping[str, Callable[[LoadModel, Sizes], Program]] = {
    "decode": partial(decode, policy="streaming", slots="small"),
    "decode, large cache": partial(decode, policy="streaming", slots="large"),
    "decode, int8 weights": partial(decode, policy="streaming", slots="small", weights="int8"),
    "decode, int8 cache": partial(
        decode, policy="streaming", slots="large", fields=",storage=int8"
    ),
    "decode, reservoir": partial(decode, policy="reservoir", slots="large"),
    "decode, balance-stream": partial(decode, policy="balance-stream", slots="large"),
    "decode, magicpig": partial(decode, policy="magicpig", slots="large"),
    "engine": engine,
    "prefill": prefill,
    "forward": forward,
    "argmax": argmax,
    "lookup": lookup,
    "index": index,
    "sampled": partial(sampled, dtype="float32"),
    "sampled, bfloat16": partial(sampled, dtype="bfloat16"),
    "training": train,
}
