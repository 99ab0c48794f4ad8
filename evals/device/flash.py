"""Flash attention on this device against XLA's plain attention: errors and times.

Chunks of a prompt over a cache, and one token over caches, at the heads of three models; and the
masks of a cache: a ring that has wrapped, a window, sinks, hidden keys, padding and odd sizes. The
error is the largest difference from attention in float32 over the largest output. A time is that of
CALLS calls in one program, because one call would measure its launch. Both sides alternate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention, refusal
from jaxkv.pallas_kernels.timing import KERNEL, time_interleaved

MAX_ERROR = 0.01  # of the largest output; bfloat16 rounds to 1 part in 256
SEED, SCALE, CALLS = 0, 0.125, 20


class FlashShape(NamedTuple):
    """Queries over a cache of `slots`, and over themselves if they are several."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    slots: int
    batch: int = 1

    @property
    def name(self) -> str:
        return (
            f"{self.heads} heads, {self.kv_heads} KV heads of {self.head_dim}, "
            f"{self.batch} x {self.tokens} tokens over {self.slots}"
        )


HEADS = (9, 3, 64), (32, 8, 64), (32, 8, 128)  # SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B
# Tokens, cached tokens, sequences.
LENGTHS = ((1024, 1024, 1), (1024, 16_384, 1), (1, 1024, 1), (1, 16_384, 1), (1, 131_072, 1),
           (1, 2048, 32))  # fmt: skip
SHAPES = tuple(FlashShape(*heads, *lengths) for heads in HEADS for lengths in LENGTHS)
QUICK = (FlashShape(4, 2, 16, 32, 64), FlashShape(4, 2, 16, 1, 64))


def measure(run: Run) -> dict[str, Any]:
    """Errors and times by shape."""
    quick, reason = run.options.quick, refusal(64, jnp.dtype("bfloat16"))
    if reason is not None and not quick:
        raise UserError(f"flash attention needs its kernel: {reason}; give --quick for a trial")
    rows: dict[str, Any] = {}
    for tokens in (1, 70):
        sets = masked_sets(tokens, 16 if quick else 64)
        rows[f"masks, {tokens} tokens"] = {"error": error(sets)}
        print(f"masks, {tokens} tokens: {rows[f'masks, {tokens} tokens']}", flush=True)
    for shape in QUICK if quick else SHAPES:
        rows[shape.name] = compared(shape, 2 if quick else run.options.rounds)
        print(f"{shape.name}: {rows[shape.name]}", flush=True)
    bars = [bar(f"{name}: error", row["error"], "<=", MAX_ERROR) for name, row in rows.items()]
    return {"shapes": rows, "bars": bars}


def compared(shape: FlashShape, rounds: int) -> dict[str, Any]:
    """The error, milliseconds of a call of both, and how many times as fast the kernel is."""
    sets = key_sets(shape)
    attend = {name: jax.jit(partial(repeated, name)) for name in implementations()}
    times = time_interleaved(attend, (sets,), rounds)
    milliseconds = {name: np.asarray(values) / CALLS for name, values in times.items()}
    row = {"error": error(sets), "milliseconds": {n: spread(v) for n, v in milliseconds.items()}}
    if len(times) > 1:
        row["times as fast"] = spread(np.divide(*milliseconds.values()))
    return row


def implementations() -> list[str]:
    """XLA's, and the kernel of this device."""
    kernel = KERNEL.get(jax.default_backend())
    return ["xla", *([kernel] if kernel else [])]


def repeated(implementation: str, sets: list[KeySet]) -> Array:
    """CALLS calls, each of which depends on the one before."""

    def call(_: Array, total: Array) -> Array:
        changed = [replace(keys, q=keys.q + (0 * total).astype(keys.q.dtype)) for keys in sets]
        return total + jnp.sum(flash_attention(changed, SCALE, implementation=implementation).lse)

    return jax.lax.fori_loop(0, CALLS, call, jnp.float32(0))


def error(sets: list[KeySet]) -> float:
    """The largest difference from float32, of the kernel where there is one, over the largest."""
    attend = lambda name: jax.jit(partial(flash_attention, scale=SCALE, implementation=name))
    wide = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
    exact = attend("xla")(jax.tree.map(wide, sets)).out
    actual = attend(implementations()[-1])(sets).out
    return float(jnp.max(jnp.abs(actual - exact)) / jnp.max(jnp.abs(exact)))


def masked_sets(tokens: int, head_dim: int) -> list[KeySet]:
    """A wrapped ring of 300 slots with a window, its sinks, a sample, and the chunk itself."""
    rng, batch, heads, kv_heads, slots = np.random.default_rng(SEED), 2, 6, 2, 300
    array = lambda *size: jnp.asarray(rng.normal(size=size), jnp.bfloat16)
    rows = lambda count: (array(batch, kv_heads, count, head_dim) for _ in range(2))
    query = lambda: array(batch, tokens, heads, head_dim)
    positions = jnp.arange(tokens, dtype=jnp.uint32)[None] + jnp.array([[2**32 - 9], [700]], "u4")
    ages = jnp.asarray(np.stack([rng.permutation(slots) for _ in range(batch)]), jnp.uint32)
    end = lambda count: jnp.full((batch, tokens), count, jnp.int32)
    where = {"query_positions": positions, "window": slots - 2}
    cached = KeySet(query(), *rows(slots), end(slots), first=4, **where,
                    key_positions=positions[:, :1] - 1 - ages)  # fmt: skip
    weight = jnp.asarray(rng.normal(size=(batch, kv_heads, 37)), jnp.float32)
    valid = jnp.asarray(rng.random((batch, tokens)) < 0.8)
    hidden = jnp.where(valid, 0, -jnp.inf).astype(jnp.float32)[:, None]
    causal = jnp.where(valid, jnp.arange(1, tokens + 1, dtype=jnp.int32)[None], 0)
    return [
        cached,
        replace(cached, q=query(), end=end(4), first=0, window=None, query_positions=None,
                key_positions=None),
        KeySet(query(), *rows(37), end(37), weight),
        KeySet(query(), *rows(tokens), causal, hidden, **where, key_positions=positions),
    ]  # fmt: skip


def key_sets(shape: FlashShape) -> list[KeySet]:
    """A full cache, and the chunk itself if it has several tokens."""
    keys = iter(jax.random.split(jax.random.key(SEED), 5))
    array = lambda *size: jax.random.normal(next(keys), size, jnp.bfloat16)
    batch, tokens, dim = shape.batch, shape.tokens, shape.head_dim
    q = array(batch, tokens, shape.heads, dim)
    cached = [array(batch, shape.kv_heads, shape.slots, dim) for _ in range(2)]
    full = jnp.full((batch, tokens), shape.slots, jnp.int32)
    sets = [KeySet(q, *cached, full)]
    if tokens > 1:
        chunk = [array(batch, shape.kv_heads, tokens, dim) for _ in range(2)]
        causal = jnp.broadcast_to(jnp.arange(1, tokens + 1, dtype=jnp.int32), (batch, tokens))
        sets.append(KeySet(q, *chunk, causal))
    return sets


MEASURE = Measure("device_flash", measure, (flag("--rounds", 20, minimum=1),))

if __name__ == "__main__":
    run(MEASURE)
