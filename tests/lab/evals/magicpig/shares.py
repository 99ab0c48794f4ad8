"""The share of the keys that a sparse policy reads, on recorded attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.models.loading.llm import Llm
from jaxkv.typing import Array, Float32

ASKED = 16  # queries on which shares are measured
SEEDS = 4  # per stretch, all different


def share_read(
    llm: Llm,
    chosen: Policy,
    stretches: Sequence[matched_budgets.Seen],
    prompt: int,
    queries: int = ASKED,
) -> dict[str, float]:
    """The share of the keys between that the last queries read: mean, min and max over layers.

    each: recorded queries, keys and values of stretches.
    """
    by_layer = [
        [_share_read(chosen, llm.spec, prompt, queries, *layer, seed) for layer in seen]
        for number, seen in enumerate(stretches)
        for seed in range(SEEDS * number, SEEDS * (number + 1))
    ]
    layers = np.mean(by_layer, axis=0)
    return {"mean": float(layers.mean()), "min": float(layers.min()), "max": float(layers.max())}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _share_read(
    chosen: Policy, spec: Spec, prompt: int, queries: int, q: Array, k: Array, v: Array,
    seed: Array,
) -> Float32[Array, ""]:  # fmt: skip
    positions = jnp.arange(len(q), dtype=jnp.uint32)
    valid, last = jnp.ones(len(q), bool), len(q) - queries
    before, middle, asking = (
        Chunk(*(a[None, part] for a in (q, k, v, positions, valid)))
        for part in (slice(prompt), slice(prompt, last), slice(last, None))
    )
    state = chosen.init(spec, 1, jax.random.key(seed))
    state = chosen.update(spec, chosen.reserve(spec, state, prompt), before)[1]
    state = chosen.reserve(spec, chosen.finish_prefill(spec, state), len(q) - prompt)
    state = chosen.update(spec, state, middle)[1] if middle.q.shape[1] else state
    return matched_budgets.attended_share(chosen, spec, state, asking, last)
