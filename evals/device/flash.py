"""Flash attention on this device against XLA's plain attention: errors, times, and bandwidth.

Chunks of a prompt over a cache, and one token over caches, at the heads of three models. The error
is the largest difference from attention in float32 over the largest output. Both sides alternate.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention, refusal
from jaxkv.pallas_kernels.online_softmax import AttentionOutput
from jaxkv.pallas_kernels.timing import KERNEL, time_interleaved

MAX_ERROR = 0.01  # of the largest output; bfloat16 rounds to 1 part in 256
SEED = 0


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
        raise UserError(f"flash attention needs its kernel: {reason}; --quick tries the program")
    rows = {}
    for shape in QUICK if quick else SHAPES:
        rows[shape.name] = compared(shape, 2 if quick else run.options.rounds)
        print(f"{shape.name}: {rows[shape.name]}", flush=True)
    bars = [bar(f"{name}: error", row["error"], "<=", MAX_ERROR) for name, row in rows.items()]
    return {"shapes": rows, "bars": bars}


def compared(shape: FlashShape, rounds: int) -> dict[str, Any]:
    """The error of the kernel, milliseconds of both, and how many times as fast it is."""
    sets = key_sets(shape)
    scale = shape.head_dim**-0.5
    names = ["xla", *([KERNEL[jax.default_backend()]] if jax.default_backend() in KERNEL else [])]
    attend = {
        name: jax.jit(partial(flash_attention, scale=scale, implementation=name)) for name in names
    }
    exact = jax.jit(partial(flash_attention, scale=scale, implementation="xla"))(
        jax.tree.map(lambda a: a.astype("f4") if a.dtype == jnp.bfloat16 else a, sets)
    )
    times = time_interleaved(attend, (sets,), rounds)
    row: dict[str, Any] = {
        "error": error(attend[names[-1]](sets), exact),
        "milliseconds": {name: spread(values) for name, values in times.items()},
    }
    if len(names) > 1:
        ratios = np.asarray(times["xla"]) / np.asarray(times[names[1]])
        row["times as fast"] = spread(ratios)
    return row


def error(actual: AttentionOutput, exact: AttentionOutput) -> float:
    """The largest difference over the largest output."""
    difference = jnp.max(jnp.abs(actual.out - exact.out))
    return float(difference / jnp.max(jnp.abs(exact.out)))


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
