"""Every form for XLA:CPU: a program of a user's size with it, and with its plain form in its place.

The plain form computes the same. All forms of a program alternate in one process. `copies` counts
arrays of a cache's size that the compiled program copies in its loops, or anywhere if it has none.
`temporary_bytes` is the memory that it needs besides its arguments and results.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Partial
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.evals.lib import hlo
from jaxkv.evals.lib.engine_step import engine_step
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.timing import Variant, prompt, ratio, time_rounds
from jaxkv.models.generation.decoding import decode_block
from jaxkv.models.generation.serving import make_model
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.decoder import layer_weights, run_layer
from jaxkv.models.training import training
from jaxkv.models.training.pretrain import setting_for
from jaxkv.models.training.recipes import PRESETS, Recipe
from jaxkv.pallas_kernels.sampled_attention import LogitSettings, reference, shapes
from jaxkv.platform import cpu as xla_cpu
from jaxkv.policies.magicpig import hash_tables
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import programs
from jaxkv.serve.engine.model import forward as run_forward
from jaxkv.state.memory import show
from jaxkv.typing import Array, Float, Float32, Int32

LoadModel = Callable[[str], Llm]  # the model with weights in float32 or int8


@dataclass(frozen=True)
class ProgramSizes:
    """The sizes of all programs.

    small, large: tokens in a cache. reserved: slots of a cache that is nearly empty. steps: tokens
    per call. keys, bits, tables: sizes of an LSH index. sequences: number whose logits one argmax
    reads. recipe, vocab: settings of training.
    """

    small: int = 256
    large: int = 1024
    reserved: int = 4096
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

    about: what it computes. args, options: make its arguments and compiler options, with the forms
    that are compiled. donate: the argument that the first result replaces; its buffers are reused.
    calls: how often one measurement calls it. steps: steps of each call, by which the time is
    divided. cached: sizes of arrays whose copies `copies` finds.
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


def decode(
    load: LoadModel,
    sizes: ProgramSizes,
    policy: str,
    large: bool = True,
    weights: str = "float32",
    fields: str = "",
    batch: int = 1,
) -> Program:
    """The decode loop of sequences whose caches are full."""
    slots = sizes.large if large else sizes.small
    half, block = slots // 2, min(64, slots // 8)
    spec = {
        "streaming": f"streaming:sinks=4,window={slots - 4}",
        "reservoir": f"reservoir:sinks=4,window={half - 4},sample={slots - half}",
        "balance-stream": (
            f"balance-stream:sinks=4,window={slots - 4 - 2 * block},levels=3,block={block}"
        ),
        "magicpig": "magicpig",
    }[policy] + fields
    llm = load(weights)
    stream = models.Stream(llm, spec, batch=batch, tokens=slots + 1 + sizes.steps)
    stream.prefill([prompt(llm, slots + 1)] * batch)
    stream.finish_prefill()
    stream.reserve(sizes.steps)
    static, filters, eos, *args = stream.decode_arguments(
        stream.decoding, Sampling(), (), sizes.steps
    )
    states = jax.tree.leaves(stream.decoding.states)
    return Program(
        f"decode, {spec}, batch of {batch}, {slots:,} tokens, {llm.config.layers} layers, "
        f"weights in {weights}",
        partial(decode_block, static, filters, eos),
        lambda: tuple(args),
        donate=1,
        steps=sizes.steps,
        options=lambda: xla_cpu.decode_compiler_options(),
        cached=frozenset(leaf.size for leaf in states if leaf.ndim >= 4),
    )


def prefill(load: LoadModel, sizes: ProgramSizes) -> Program:
    """A chunk through one layer whose cache is full."""
    llm, slots = load("float32"), sizes.large
    spec = f"streaming:sinks=4,window={slots - 4}"
    policy = llm.policies(spec)[0]
    state = policy.init(llm.spec, 1, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, slots, llm.config.width), llm.dtype)
    at = jnp.arange(slots, dtype=jnp.uint32)[None]
    run = partial(run_layer, llm.config, policy, step)
    weights, valid = layer_weights(llm.weights, 0), jnp.ones((1, slots), bool)
    _, full = jax.jit(run)(weights, x, state, at, valid)
    args = weights, x, full, at + np.uint32(slots), valid
    about = f"prefill, {spec}, {slots:,} tokens in the cache and in the chunk, 1 layer"
    return Program(about, run, lambda: args)


def forward(load: LoadModel, sizes: ProgramSizes) -> Program:
    """A chunk through all layers in one program, with an empty cache."""
    llm, tokens = load("float32"), sizes.large
    spec = f"streaming:sinks=4,window={tokens - 4}"
    model = make_model(llm, spec)
    states = tuple(policy.init(model.specs[0], 1, jax.random.key(0)) for policy in model.policies)
    ids = jnp.asarray([prompt(llm, tokens)], jnp.int32)
    at, valid = jnp.arange(tokens, dtype=jnp.uint32)[None], jnp.ones((1, tokens), bool)
    last = jnp.full((1, 1), tokens - 1, jnp.int32)

    def chunk(weights: Any, states: Any, ids: Array) -> Any:
        logits, states = run_forward(model, weights, ids, at, valid, states, last)
        return states, logits

    about = f"forward, {spec}, a chunk of {tokens:,} tokens, {llm.config.layers} layers"
    return Program(about, chunk, lambda: (model.weights, states, ids), donate=1)


def engine(load: LoadModel, sizes: ProgramSizes, reserved: bool = False) -> Program:
    """A decode step of the engine for one sequence under full attention."""
    llm, slots = load("float32"), sizes.reserved if reserved else sizes.large
    model = make_model(llm, "full")
    like = jax.eval_shape(lambda: programs.empty_batch(model, 1, slots).states)

    def step(*arguments: Any) -> Any:
        return engine_step(model, like, *arguments)

    def args() -> tuple[Any, ...]:
        batch = programs.carry_batch(model, programs.empty_batch(model, 1, slots))
        return model.weights, batch, np.ones(1, bool), np.bool_(False)

    caches = frozenset(leaf.size for leaf in jax.tree.leaves(like) if leaf.ndim >= 4)
    about = f"engine decode, full, 1 sequence of up to {slots:,} tokens, {llm.config.layers} layers"
    return Program(about, step, args, donate=1, calls=sizes.steps, cached=caches, copies=hlo.copies)


def argmax(load: LoadModel, sizes: ProgramSizes) -> Program:
    """Greedy tokens of a batch."""
    shape = sizes.sequences, load("float32").config.vocab
    logits = jax.random.normal(jax.random.key(0), shape)
    about = f"greedy tokens of {shape[0]} sequences, {shape[1]:,} logits each"
    return Program(about, lambda x: xla_cpu.argmax(x), lambda: (logits,), calls=8)


def index(_: LoadModel, sizes: ProgramSizes) -> Program:
    """The hash tables of one KV head."""
    args = random_codes(sizes), jnp.ones(sizes.keys, bool)

    def build(codes: Array, valid: Array) -> hash_tables.Tables:
        return hash_tables.build(codes, valid, sizes.bits)

    about = f"magicpig, tables of {sizes.keys:,} keys, {sizes.tables} tables"
    return Program(about, build, lambda: args)


def random_codes(sizes: ProgramSizes) -> Int32[Array, "L S"]:
    random = np.random.default_rng(0)
    codes = random.integers(0, 1 << sizes.bits, (sizes.tables, sizes.keys))
    return jnp.asarray(codes, jnp.int32)


def sampled(load: LoadModel, sizes: ProgramSizes) -> Program:
    """Attention of one token to sampled keys, as magicpig attends."""
    config = load("float32").config
    num_sampled = int(1.5 * shapes.SAMPLED * sizes.keys)
    shape = shapes.AttentionBenchShape(
        1, config.heads, config.kv_heads, sizes.keys, config.head_dim, num_sampled, "float32"
    )
    args = shapes.inputs(shape, "log", fraction=shapes.SAMPLED)
    attend = partial(reference.attend, LogitSettings(config.head_dim**-0.5))
    about = f"sampled attention to {shapes.SAMPLED:.0%} of {sizes.keys:,} keys in float32"
    return Program(about, attend, lambda: args, calls=4 * sizes.steps)


def train(_: LoadModel, sizes: ProgramSizes) -> Program:
    """One training step on random tokens."""
    recipe = sizes.recipe
    setting = setting_for(recipe, sizes.vocab, (), 0)
    random = np.random.default_rng(0)
    runs = random.integers(3, sizes.vocab, (recipe.batch_size, recipe.context + 1)).astype(np.int32)
    args = training.init(setting), setting.split(runs)
    # Without its jit, whose trace would outlive the form.
    update = partial(training.update.__wrapped__, setting)
    about = (
        f"training step, {recipe.layers} layers of width {recipe.width}, vocabulary of "
        f"{sizes.vocab:,}, {recipe.batch_size} samples of {recipe.context} tokens"
    )
    return Program(about, update, lambda: args, donate=0)


PROGRAMS: Mapping[str, Callable[[LoadModel, ProgramSizes], Program]] = {
    "decode": partial(decode, policy="streaming", large=False),
    "decode, batch": partial(decode, policy="streaming", large=False, batch=8),
    "decode, large cache": partial(decode, policy="streaming"),
    "decode, int8 weights": partial(decode, policy="streaming", large=False, weights="int8"),
    "decode, int8 cache": partial(decode, policy="streaming", fields=",storage=int8"),
    "decode, reservoir": partial(decode, policy="reservoir"),
    "decode, balance-stream": partial(decode, policy="balance-stream"),
    "decode, magicpig": partial(decode, policy="magicpig"),
    "engine": engine,
    "engine, long": partial(engine, reserved=True),
    "prefill": prefill,
    "forward": forward,
    "argmax": argmax,
    "index": index,
    "sampled": sampled,
    "training": train,
}


def plain_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    scale: float,
    softcap: float | None = None,
) -> Float32[Array, "B K G T S"]:
    """`attention.scores` of a float cache, with B and K as two axes."""
    batch, queries, heads, head_dim = q.shape
    q = q.reshape(batch, queries, k.shape[1], heads // k.shape[1], head_dim)
    logits = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * np.float32(scale)
    return logits if softcap is None else np.float32(softcap) * jnp.tanh(logits / softcap)


def plain_blend(logits: Float32[Array, "B K G T S"], v: Float[Array, "B K S H"]) -> Partial:
    """`attention.blend` of a float cache, with B and K as two axes."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0, np.float32(1), total)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v, precision="highest") / safe
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))[..., 0]
    batch, kv_heads, group, queries, _ = out.shape
    by_query = (batch, queries, kv_heads * group)
    out = out.transpose(0, 3, 1, 2, 4).reshape(*by_query, -1)
    return Partial(out, lse.transpose(0, 3, 1, 2).reshape(by_query))


def plain_attention(
    attend: Callable[..., Partial], q: Array, k: Array, v: Array, bias: Array
) -> Partial:
    """`attend_filled` of all slots."""
    return attend(q, k, v, bias, 0, size=k.shape[2])


def plain_sort(codes: Int32[Array, "L S"], bits: int) -> tuple[Array, Array]:
    """`sort_codes` by pairs of a code and a place."""
    place = jnp.broadcast_to(jnp.arange(codes.shape[1], dtype=jnp.int32), codes.shape)
    return tuple(jax.lax.sort((codes, place), dimension=1, num_keys=1, is_stable=True))


def plain_argmax(logits: Float32[Array, "B V"]) -> tuple[Array, Array]:
    return jnp.argmax(logits, axis=-1), jnp.max(logits, axis=-1)


def vmap(function: Callable, *arrays: Any) -> Any:
    return jax.vmap(function)(*arrays)


def first_argument(value: Any, *_: Any, **__: Any) -> Any:
    return value


def second_argument(_: Any, value: Any, *__: Any, **___: Any) -> Any:
    return value


class PlainForm(NamedTuple):
    """program: where the form is measured. plain: what replaces each module attribute."""

    program: str
    plain: Mapping[str, Any]


ONE_BLOCK = 2**30  # larger than every array
CPU, KERNELS, LOOP = (
    "jaxkv.platform.cpu",
    "jaxkv.pallas_kernels.sampled_attention.reference",
    "jaxkv.serve.engine",
)
FLAT_ROWS = {
    f"jaxkv.{module}.{name}": plain
    for module in ("attention", "cache.ring")
    for name, plain in (("scores", plain_scores), ("blend", plain_blend))
}
CARRY = {
    f"{LOOP}.programs.carry": second_argument,
    f"{LOOP}.programs.restore": second_argument,
}

FORMS: dict[str, PlainForm] = {
    "attend_by_head": PlainForm("prefill", {f"{CPU}.CACHED_LOGITS": ONE_BLOCK}),
    "product_with_int8": PlainForm("decode, int8 cache", {f"{CPU}.FEW_ROWS": 0}),
    "argmax": PlainForm("argmax", {f"{CPU}.argmax": plain_argmax}),
    **{
        f"order_after-{policy}": PlainForm(
            f"decode, {policy}", {f"{CPU}.order_after": first_argument}
        )
        for policy in ("reservoir", "balance-stream", "magicpig")
    },
    "map_sequences": PlainForm("decode, large cache", {f"{CPU}.map_sequences": vmap}),
    "map_sequences-magicpig": PlainForm("decode, magicpig", {f"{CPU}.map_sequences": vmap}),
    "flatten_heads": PlainForm("decode, large cache", {f"{CPU}.flatten_heads": first_argument}),
    "shared_leaves": PlainForm("forward", {f"{LOOP}.model.deduplicate_shared": second_argument}),
    "carry": PlainForm("engine", CARRY),
    "attend_filled": PlainForm("engine, long", {f"{CPU}.attend_filled": plain_attention}),
    "flat_rows": PlainForm("decode, large cache", FLAT_ROWS),
    "sort": PlainForm("index", {f"{CPU}.sort_codes": plain_sort}),
    "decode_compiler_options": PlainForm(
        "decode, reservoir", {f"{CPU}.decode_compiler_options": dict}
    ),
    "linear": PlainForm("decode, batch", {f"{CPU}.FEW_TOKENS": 0}),
    "matmul": PlainForm("decode", {f"{CPU}.FEW_TOKENS": 0}),
    "widen": PlainForm("decode, int8 weights", {f"{CPU}.in_loop": first_argument}),
    "matmul_widened": PlainForm("decode, int8 weights", {f"{CPU}.WIDENED": ONE_BLOCK}),
    "logits_at_once": PlainForm("training", {f"{CPU}.LOGITS_AT_ONCE": {}}),
    "query_block": PlainForm("training", {f"{CPU}.query_block": lambda: 512}),
    "map_samples": PlainForm("training", {f"{CPU}.map_samples": vmap}),
    "gathered_slots": PlainForm("sampled", {f"{KERNELS}.GATHERED_SLOTS": ONE_BLOCK}),
    "gathered_slots-128": PlainForm("sampled", {f"{KERNELS}.GATHERED_SLOTS": 128}),
}


FLAGS = (
    flag("--rounds", 9, "of each measurement", minimum=1),
    flag("--only", tuple(FORMS), "some rows, with --quick", choices=FORMS),
)


def measure(run: Run) -> dict[str, Any]:
    """The rows of all forms, which are printed."""
    options = run.options
    if jax.default_backend() != "cpu":
        raise UserError("forms are for XLA:CPU, got another backend; set JAX_PLATFORMS=cpu")
    if len(options.only) < len(FORMS) and not options.quick:
        raise UserError("--only must stand with --quick: a record has all rows; give both")
    jax.config.update("jax_enable_compilation_cache", False)  # of this process alone

    @functools.cache
    def load(weights: str) -> Llm:
        quantised = None if weights == "float32" else weights
        return models.load(smollm2.NAME, "float32", weights=quantised)

    results = rows_of(load, ProgramSizes(), options.only, 3 if options.quick else options.rounds)
    print(table_of(results))
    return results


def rows_of(
    load: LoadModel, sizes: ProgramSizes, names: Sequence[str], rounds: int
) -> dict[str, Any]:
    """The rows of these forms, by program."""
    described: dict[str, str] = {}
    rows: dict[str, dict[str, Any]] = {}
    for program in dict.fromkeys(FORMS[name].program for name in names):
        built = PROGRAMS[program](load, sizes)
        described[program] = built.about
        rows |= measure_forms(
            built, program, [x for x in names if FORMS[x].program == program], rounds
        )
    return {"programs": described, "rows": rows}


def measure_forms(
    program: Program, title: str, names: Sequence[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """The rows of the forms of one program."""
    plain = {"with": {}} | {name: FORMS[name].plain for name in names}
    compiled, variants, about = {}, {}, {}
    for form, replaced in plain.items():
        start = perf_counter()
        lowered, args = lower(program, replaced)
        compiled[form] = lowered.compile()
        about[form] = describe(program, compiled[form]) | {"compiling": perf_counter() - start}
        variants[form] = variant(program, compiled[form], args)
    seconds = time_rounds(variants, rounds, title)
    per_step = {
        form: spread(1e3 / program.calls / program.steps * np.array(taken))
        for form, taken in seconds.items()
    }
    return {
        name: {
            "plain": list(FORMS[name].plain),
            "program": title,
            "milliseconds": {"with": per_step["with"], "without": per_step[name]},
            "ratio": ratio(seconds[name], seconds["with"]),
            "same_program": body(compiled[name]) == body(compiled["with"]),
            **{
                key: {"with": value, "without": about[name][key]}
                for key, value in about["with"].items()
            },
        }
        for name in names
    }


def lower(program: Program, plain: Mapping[str, Any]) -> tuple[jax.stages.Lowered, tuple[Any, ...]]:
    """A program with plain forms in the place of others, before XLA, and its arguments."""
    jax.clear_caches()  # traces of another form
    with ExitStack() as stack:
        for target, form in plain.items():
            stack.enter_context(mock.patch(target, form))
        args = program.args()
        jitted = jax.jit(
            lambda *args: program.function(*args),
            donate_argnums=() if program.donate is None else program.donate,
            compiler_options=program.options(),
        )
        lowered = jitted.lower(*args)
    jax.clear_caches()
    return lowered, args


def describe(program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """The copies of caches in a compiled program, and its temporary memory."""
    copies = len(program.copies(compiled.as_text(), program.cached)) if program.cached else None
    return {"copies": copies, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def body(compiled: jax.stages.Compiled) -> dict[str, list[str]]:
    """The operations of a compiled program, without their source lines."""
    return hlo.computations(re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()))


def variant(program: Program, compiled: jax.stages.Compiled, args: tuple[Any, ...]) -> Variant:
    """Calls the program, always from the same arguments."""

    def run() -> float:
        call_args = jax.block_until_ready(to_donate(program, args))
        start = perf_counter()
        for _ in range(program.calls):
            result = compiled(*call_args)
            if program.donate is not None:
                call_args[program.donate] = result[0]
        jax.block_until_ready(result)
        return perf_counter() - start

    return run


def to_donate(program: Program, args: Sequence[Any]) -> list[Any]:
    """Arguments for one call, after which the given ones still exist."""
    copied = list(args)
    if program.donate is not None:
        copied[program.donate] = jax.tree.map(jnp.copy, copied[program.donate])
    return copied


def table_of(results: dict[str, Any]) -> str:
    """One line per program, and one row per form."""
    lines = [f"- {name}: {about}." for name, about in results["programs"].items()]
    heads = ("row", "program", "ms with", "ms without", "times as long without",
             "copies with, without", "memory with, without")  # fmt: skip
    lines += ["", *table_head(*heads)]
    for name, row in results["rows"].items():
        copies, memory = row["copies"], row["temporary_bytes"]
        cells = (
            f"`{name}`", row["program"],
            *(f"{taken['median']:.4g}" for taken in row["milliseconds"].values()),
            ranged(row["ratio"], "median", ".2f"),
            "" if copies["with"] is None else f"{copies['with']}, {copies['without']}",
            ", ".join(map(show, memory.values())),
        )  # fmt: skip
        lines.append(table_row(*cells))
    return page_table(lines)


TABLES = {"workarounds": lambda: table_of(read("workarounds")["results"])}

MEASURE = Measure("workarounds", measure, FLAGS, data=lambda _: [smollm2.fetch()])

if __name__ == "__main__":
    run(MEASURE)
