"""Decoding speed of MagicPIG after a long prompt, compared with full attention.

A Llama of 110 million random weights. Prefill would take too long, so the caches are filled with
keys of random direction in two thirds of the dimensions, with an offset, as in real models. Each
query then attends to about as many keys as in real models. Layers are left out if the caches would
not fit in memory. The record `lookup` has attention of one KV head alone, by hash tables and in
dense forms; its commit has its command.
"""

from __future__ import annotations

import argparse
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.cache.ring import Ring
from jaxkv.contract import Policy, Spec
from jaxkv.errors import UserError
from jaxkv.evals.lib.baseline import LARGE, SMALL, random_llama
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.state_sizes import prefilled_bytes
from jaxkv.evals.lib.timing import Variant, generate_greedy, rate, ratio, time_rounds, timed
from jaxkv.evals.lib.verdict import Results, above, claim
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.models.loading.compilation import clock
from jaxkv.models.loading.llm import Llm
from jaxkv.policies import Full, MagicPIG
from jaxkv.policy_spec import format_policy
from jaxkv.state import batch
from jaxkv.typing import Array

SIZES = (32_768, 131_072)
ROOM = 1024  # tokens after the prompt
BUDGET = 8192  # keys per query head; more than it attends to, so that none is dropped
MEMORY = 12 * 2**30  # bytes for the caches of both


FLAGS = (
    flag("--sizes", SIZES, "of the prompts", minimum=256),
    flag("--written", 16, "tokens that are timed", minimum=1),
    flag("--rounds", 5, minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """All lengths; with a small model if --quick is given."""
    options = run.options
    tokens = (options.rounds + 2) * options.written
    if tokens > ROOM:
        raise UserError(
            f"--rounds plus 2, times --written, must be at most {ROOM} tokens, got {tokens}; give "
            "fewer"
        )
    shape = SMALL if options.quick else LARGE
    return {str(size): measure_size(shape, size, options) for size in options.sizes}


def measure_size(shape: dict[str, int], size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One length; both policies alternate."""
    policies = {"full": Full(max=size + ROOM, start=1),
                "magicpig": MagicPIG(budget=BUDGET, tail=ROOM, start=1)}  # fmt: skip
    llm, _ = random_llama(shape | {"layers": 1})
    needed = {name: prefilled_bytes(policy, llm.spec, size) for name, policy in policies.items()}
    layers = max(1, min(shape["layers"], MEMORY // sum(needed.values())))
    llm, _ = random_llama(shape | {"layers": layers})
    results: dict[str, Any] = {"layers": layers, "of": shape["layers"]}
    streams: dict[str, models.Stream] = {}
    # the policy that indexes its prompt comes first, while memory is free
    for name in sorted(policies, reverse=True):
        streams[name] = filled(llm, policies[name], size)
        if name == "magicpig":
            results["seconds_to_index"] = time_finish_prefill(streams[name])
    results["share_attended"] = attended_share(llm, streams["magicpig"], size)
    results["compile_seconds"] = {}
    variants: dict[str, Variant] = {}
    for name, stream in streams.items():
        before = clock().seconds
        generate_greedy(stream, options.written)
        results["compile_seconds"][name] = clock().seconds - before
        variants[name] = timed(partial(generate_greedy, stream, options.written))
    seconds = time_rounds(variants, options.rounds, f"{options.written} tokens after {size:,}")
    return results | {
        "policies": {name: format_policy(policy) for name, policy in policies.items()},
        "tokens": options.written,
        "tokens_per_second": {name: rate(options.written, s) for name, s in seconds.items()},
        "milliseconds": {
            n: spread(1e3 / options.written * np.array(s)) for n, s in seconds.items()
        },
        "times_faster": ratio(seconds["full"], seconds["magicpig"]),
        "state_bytes": {n: batch.nbytes(stream.decoding.states) for n, stream in streams.items()},
    }


def filled(llm: Llm, chosen: Policy, size: int) -> models.Stream:
    """A stream whose layers contain a prompt of random keys and values, with room after it unless
    `finish_prefill` makes room."""
    stream = models.Stream(llm, chosen)
    room = ROOM if chosen.min_prompt is None else 0
    states = []
    for layer, state in enumerate(stream.decoding.states):
        held = draw(llm.spec, size, room, jax.random.key(layer))
        states.append(held if isinstance(state, Ring) else state._replace(dense=held))
    random = jax.random.normal(jax.random.key(0), stream.decoding.logits.shape)
    stream.decoding = stream.decoding._replace(
        states=tuple(states), logits=random, position=jnp.full((1,), size, jnp.uint32),
        done=jnp.zeros((1,), bool),
    )  # fmt: skip
    stream.lengths = np.full(1, size)
    return stream


@partial(jax.jit, static_argnums=(0, 1, 2))
def draw(spec: Spec, size: int, empty_slots: int, key: Array) -> Ring:
    """Random tokens of one sequence, and slots for more."""
    dim, dims = spec.head_dim, 2 * spec.head_dim // 3
    of_basis, of_offset, of_keys, of_values = jax.random.split(key, 4)
    basis = jnp.linalg.qr(jax.random.normal(of_basis, (dim, dims)))[0].T
    offset = 6 * jax.random.normal(of_offset, (1, 1, 1, dim)) / np.float32(dim**0.5)
    shape = (1, spec.kv_heads, size)
    k = jax.random.normal(of_keys, (*shape, dims)) @ basis + offset
    v = jax.random.normal(of_values, (*shape, dim)) + 1
    room = ((0, 0), (0, 0), (0, empty_slots), (0, 0))
    positions = jnp.pad(jnp.arange(size, dtype=jnp.uint32)[None], ((0, 0), (0, empty_slots)))
    return Ring(
        *(jnp.pad(a.astype(spec.dtype), room) for a in (k, v)), positions,
        jnp.full((1,), size, jnp.int32),
    )  # fmt: skip


def time_finish_prefill(stream: models.Stream) -> float:
    """Finish prefill; return the seconds that it took, without compilation."""
    jax.block_until_ready(stream.decoding)
    start, compiled = perf_counter(), clock().seconds
    stream.finish_prefill()
    jax.block_until_ready(stream.decoding)
    return perf_counter() - start - (clock().seconds - compiled)


def attended_share(llm: Llm, stream: models.Stream, size: int) -> dict[str, float]:
    """The share of the keys between that one token attends to: mean, min and max over layers."""
    layers = np.asarray(matched_budgets.attended_shares(
        llm.config, stream.policies, llm.weights, stream.decoding.states,
        jnp.full((1, 1), 3, jnp.int32), jnp.full((1, 1), size, jnp.uint32), jnp.int32(size),
    ))  # fmt: skip
    return {"mean": float(layers.mean()), "min": float(layers.min()), "max": float(layers.max())}


def bytes_over_full(results: Results) -> dict[str, float]:
    """Bytes of the caches, tables included, over those of full attention."""
    return {
        f"{int(size):,} tokens": case["state_bytes"]["magicpig"] / case["state_bytes"]["full"]
        for size, case in results.items()
    }


MEASURE = Measure("sparse_tokens", measure, FLAGS)
CLAIMS = (
    claim("1.5 to 5 times the throughput, caches on a CPU",
          "Attention of one KV head by hash tables is over 1.5 times as fast as the best dense "
          "form on a CPU, by tokens", "lookup",
          above("sizes/{tokens}/times_faster", 1.5), unit="times"),
    claim("not claimed", "With its tables, the cache of `magicpig` is larger than that of `full`",
          "sparse_tokens", above(bytes_over_full, 1), unit="times"),
    claim("1.5 to 5 times the throughput",
          "Decoding after long prompts is over 1.5 times as fast as under `full`, by tokens",
          "sparse_tokens", above("{tokens}/times_faster", 1.5), unit="times"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
