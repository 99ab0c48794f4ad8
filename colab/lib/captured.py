"""What notebooks 03 and 04 share: some layers of a model, and a table of losses after prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.evals.magicpig import heads
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.models.loading.llm import Llm
from jaxkv.typing import Float


def some_layers(
    llm: Llm, ids: Sequence[int], stretches: int, parts: int = 3
) -> dict[int, CapturedLayer]:
    """The first layer, those after each of `parts` equal parts, and the last, by their numbers."""
    last = llm.config.layers - 1
    numbers = sorted({round(part * last / parts) for part in range(parts + 1)})
    return dict(zip(numbers, heads.layers_of(llm, ids, stretches, numbers), strict=True))


# One program: outside of jit, each operation is compiled by itself.
@partial(jax.jit, static_argnums=0)
def last_logits(spec: Spec, layer: CapturedLayer) -> Float[jax.Array, "B K G Q S"]:
    """The logits of the last queries for every key, -inf for keys after the query."""
    queries = heads.last_queries(spec, layer, 0, 1)
    return jnp.where(queries.selectable | queries.exact, queries.logits, -jnp.inf)


def attention_weights(spec: Spec, layer: CapturedLayer) -> Float[np.ndarray, "B K G Q S"]:
    """The weights with which the last queries attend to every key."""
    logits = np.asarray(last_logits(spec, layer), np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sink_weight(spec: Spec, layer: CapturedLayer) -> float:
    """The weight of the first token; mean over heads and queries."""
    return float(attention_weights(spec, layer)[..., 0].mean())


def loss_table(losses: Mapping[str, Sequence[float]], notes: Mapping[str, str]) -> str:
    """By policy, losses minus those of the first one, with two standard errors over stretches.

    notes: what stands after the loss of each policy.
    """
    base, *compared = losses
    lines = [f"{'':18} loss minus that of {base} ± two standard errors"]
    for name in compared:
        gap = np.subtract(losses[name], losses[base])
        error = 2 * gap.std(ddof=1) / len(gap) ** 0.5
        lines.append(f"{name:18}{gap.mean():+8.3f} ± {error:.3f}   {notes[name]}")
    return "\n".join(lines)
