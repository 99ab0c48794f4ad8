"""Every workaround for XLA:CPU: a program of a user's size with it and without it.

Without it means with its plain form in its place, which computes the same. All forms of a program
alternate in one process. `copies` counts arrays of a cache's size that the compiled program copies
in its loops, or anywhere if it has none. `temporary_bytes` is the memory that it needs besides its
arguments and results.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import attention, models
from jaxkv.cache import ring
from jaxkv.evals.lib import hlo
from jaxkv.evals.lib.record import Record, make_parser, run_command, spread
from jaxkv.evals.lib.timing import Variant, ratio, time_rounds
from jaxkv.evals.speed import plain_forms
from jaxkv.evals.speed.workaround_programs import LOADED, PROGRAMS, LoadModel, Program, Sizes
from jaxkv.models.generation import decoding
from jaxkv.models.loading import smollm2
from jaxkv.models.network import cross_entropy, decoder
from jaxkv.models.network import xla_cpu as models_xla_cpu
from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels import xla_cpu as kernels_xla_cpu
from jaxkv.platform import cpu as xla_cpu
from jaxkv.policies.magicpig import hash_tables
from jaxkv.serve.engine import model as engine_model
from jaxkv.serve.engine import programs as engine

WITH = "with"  # the form of a program that has all workarounds


class Patch(NamedTuple):
    """A module's attribute and its plain form."""

    module: Any
    attribute: str
    plain: Any


class Workaround(NamedTuple):
    """place: the file and function. program: where it is measured. plain: what replaces it."""

    place: str
    program: str
    plain: tuple[Patch, ...]


def row(program: str, place: str, *patches: tuple[Any, str, Any]) -> Workaround:
    """A workaround; patches: modules, attributes and their plain forms."""
    return Workaround(place, program, tuple(Patch(*patch) for patch in patches))


def without_order(chunk: Any, *read: Any) -> Any:
    return chunk


def vmap(function: Callable, *arrays: Any) -> Any:
    return jax.vmap(function)(*arrays)


PLAIN_DOT = models_xla_cpu.dot.fun  # without its gradient rule
ONE_BLOCK = 2**30  # larger than every array
HERE, MODELS, KERNELS = (
    "jaxkv/platform/cpu.py",
    "models/network/xla_cpu.py",
    "pallas_kernels/xla_cpu.py",
)

WORKAROUNDS: dict[str, Workaround] = {
    "attend_by_head": row(
        "prefill", f"{HERE} attend_by_head", (xla_cpu, "CACHED_LOGITS", ONE_BLOCK)
    ),
    "product_with_int8": row(
        "decode, int8 cache", f"{HERE} product_with_int8", (xla_cpu, "FEW_ROWS", 0)
    ),
    "argmax": row(
        "argmax", f"{HERE} argmax",
        (xla_cpu, "argmax", lambda x: (jnp.argmax(x, axis=-1), jnp.max(x, axis=-1))),
    ),
    **{
        f"order_after-{policy}": row(
            f"decode, {policy}", f"{HERE} order_after", (xla_cpu, "order_after", without_order)
        )
        for policy in ("reservoir", "balance-stream", "magicpig")
    },
    "map_sequences": row(
        "decode, large cache", f"{HERE} map_sequences", (xla_cpu, "map_sequences", vmap)
    ),
    "map_sequences-magicpig": row(
        "decode, magicpig", f"{HERE} map_sequences", (xla_cpu, "map_sequences", vmap)
    ),
    "cumsum": row("lookup", f"{HERE} cumsum", (xla_cpu, "cumsum", jnp.cumsum)),
    "flatten_heads": row(
        "decode, large cache", "jaxkv/state/loop_carry.py flatten_heads",
        (decoding, "flatten_heads", lambda states, sharded: states),
    ),
    "shared_leaves": row(
        "forward", "jaxkv/state/loop_carry.py deduplicate_shared",
        (engine_model, "deduplicate_shared", lambda policies, states: states),
    ),
    "carry": row(
        "engine", "jaxkv/serve/engine/programs.py carry",
        (engine, "carry", lambda batch: batch),
        (engine, "restore", lambda batch, like: batch),
    ),
    "flat_rows": row(
        "decode, large cache", f"{HERE} flat_rows",
        *((module, name, getattr(plain_forms, name))
          for module in (attention, ring) for name in ("scores", "blend")),
    ),
    "tally": row(
        "lookup", "jaxkv/policies/magicpig/hash_tables.py tally",
        (hash_tables, "tally", plain_forms.tally),
    ),
    "sort": row(
        "index", f"{HERE} sort_codes", (xla_cpu, "sort_codes", plain_forms.sort_codes),
    ),
    "decode_compiler_options": row(
        "decode, reservoir", f"{MODELS} decode_compiler_options",
        (models_xla_cpu, "decode_compiler_options", dict),
    ),
    "matmul": row(
        "decode", f"{MODELS} matmul",
        (models_xla_cpu, "matmul", lambda weight, x, dtype, plain: plain(weight, x)),
    ),
    "widen": row(
        "decode, int8 weights", f"{MODELS} widen",
        (models_xla_cpu, "widen", lambda values, x: values.astype(x.dtype)),
    ),
    "matmul_widened": row(
        "decode, int8 weights", f"{MODELS} matmul_widened", (models_xla_cpu, "_BLOCK", ONE_BLOCK)
    ),
    "dot": row(
        "training", f"{MODELS} dot",
        *((module, "dot", PLAIN_DOT) for module in (models_xla_cpu, decoder, cross_entropy)),
    ),
    **{
        f"has_head_last_product{program}": row(
            program.strip("-") or "forward", f"{MODELS} has_head_last_product",
            (decoder, "has_head_last_product", lambda x, tokens: False),
        )
        for program in ("", "-training")
    },
    "logits_at_once": row(
        "training", f"{MODELS} LOGITS_AT_ONCE", (models_xla_cpu, "LOGITS_AT_ONCE", {})
    ),
    "query_block": row(
        "training", f"{MODELS} query_block", (models_xla_cpu, "query_block", lambda: 512)
    ),
    "map_samples": row("training", f"{MODELS} map_samples", (models_xla_cpu, "map_samples", vmap)),
    "gathered_slots": row(
        "sampled", f"{KERNELS} GATHERED_SLOTS", (kernels_xla_cpu, "GATHERED_SLOTS", ONE_BLOCK)
    ),
    "gathered_slots-128": row(
        "sampled", f"{KERNELS} GATHERED_SLOTS", (kernels_xla_cpu, "GATHERED_SLOTS", 128)
    ),
    "gather": row(
        "sampled, bfloat16", f"{KERNELS} gather",
        (kernels_xla_cpu, "gather", lambda array, at: host_memory.take(array, at)),
    ),
}  # fmt: skip


def main() -> None:
    parser = make_parser("jaxkv.evals.speed.workarounds", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=WORKAROUNDS, metavar="NAME",
                        help=f"some rows, into out/: {', '.join(WORKAROUNDS)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="three rounds, into out/")
    options = parser.parse_args()
    if jax.default_backend() != "cpu":
        parser.error("these are workarounds for XLA:CPU: set JAX_PLATFORMS=cpu")
    quick = options.quick or options.only is not None
    record = Record("workarounds", [smollm2.fetch()], [0], quick=quick)
    jax.config.update("jax_enable_compilation_cache", False)  # of this process alone
    load = functools.cache(lambda name: models.load(*LOADED[name]))
    rounds = 3 if options.quick else options.rounds
    record.finish(run(load, Sizes(), options.only or list(WORKAROUNDS), rounds))


def run(load: LoadModel, sizes: Sizes, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """The rows of these workarounds, by program."""
    described, rows = {}, {}
    for program in dict.fromkeys(WORKAROUNDS[name].program for name in names):
        built = PROGRAMS[program](load, sizes)
        of_program = [name for name in names if WORKAROUNDS[name].program == program]
        described[program] = built.about
        for name, measured in measure(built, program, of_program, rounds).items():
            rows[name] = measured
            print(f"{name}: {line(measured)}", flush=True)
    return {"programs": described, "rows": rows}


def measure(
    program: Program, title: str, names: Sequence[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """The rows of the workarounds of one program."""
    forms = {WITH: ()} | {name: WORKAROUNDS[name].plain for name in names}
    compiled, variants, about = {}, {}, {}
    for form, plain in forms.items():
        start = perf_counter()
        lowered, args = lower(program, plain)
        compiled[form] = lowered.compile()
        about[form] = describe(program, compiled[form]) | {"compiling": perf_counter() - start}
        variants[form] = variant(program, compiled[form], args)
    seconds = time_rounds(variants, rounds, title)
    milliseconds = {
        form: 1e3 / program.calls / program.steps * np.array(s) for form, s in seconds.items()
    }
    program_body = body(compiled[WITH])
    return {
        name: {
            "place": WORKAROUNDS[name].place,
            "program": title,
            "milliseconds": {
                "with": spread(milliseconds[WITH]),
                "without": spread(milliseconds[name]),
            },
            "ratio": ratio(seconds[name], seconds[WITH]),
            "same_program": body(compiled[name]) == program_body,
            **{key: {"with": about[WITH][key], "without": about[name][key]} for key in about[WITH]},
        }
        for name in names
    }


def lower(program: Program, plain: Sequence[Patch]) -> tuple[jax.stages.Lowered, tuple[Any, ...]]:
    """A program with plain forms in the place of workarounds, before XLA, and its arguments."""
    jax.clear_caches()  # traces of another form
    with ExitStack() as stack:
        for patch in plain:
            stack.enter_context(mock.patch.object(*patch))
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
    memory = compiled.memory_analysis()
    return {"copies": copies, "temporary_bytes": memory.temp_size_in_bytes}


def body(compiled: jax.stages.Compiled) -> dict[str, list[str]]:
    """The operations of a compiled program, without their source lines."""
    return hlo.computations(re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()))


def variant(program: Program, compiled: jax.stages.Compiled, args: tuple[Any, ...]) -> Variant:
    """Calls the program, always from the same arguments."""
    at = program.donate

    def run() -> float:
        call_args = jax.block_until_ready(to_donate(program, args))
        start = perf_counter()
        for _ in range(program.calls):
            result = compiled(*call_args)
            if at is not None:
                call_args[at] = result[0]
        jax.block_until_ready(result)
        return perf_counter() - start

    return run


def to_donate(program: Program, args: Sequence[Any]) -> list[Any]:
    """Arguments for one call, after which the given ones still exist."""
    copied = list(args)
    if program.donate is not None:
        copied[program.donate] = jax.tree.map(jnp.copy, copied[program.donate])
    return copied


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    with_, without = (row["milliseconds"][form]["median"] for form in ("with", "without"))
    over, copies, memory = row["ratio"], row["copies"], row["temporary_bytes"]
    text = (f"{with_:.4g} ms, without {without:.4g} ms, ratio {over['median']:.3f} "
            f"({over['min']:.3f} to {over['max']:.3f})")  # fmt: skip
    if copies["with"] is not None:
        text += f", {copies['with']} copies, without {copies['without']}"
    text += f", {memory['with'] / 1e6:.1f} MB, without {memory['without'] / 1e6:.1f} MB"
    return text + (", the same program" if row["same_program"] else "")


if __name__ == "__main__":
    run_command(main)
