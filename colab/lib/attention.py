"""Queries, keys and values of a model, and the attention weights that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights
from jaxkv.typing import Array, Float, Int32

QUERIES = 64  # last tokens of a text whose attention is measured


class Heads(NamedTuple):
    """One layer: the last queries and all keys, rotated to their positions, and the values."""

    q: Float[np.ndarray, "B N Q H"]
    k: Float[np.ndarray, "B N S H"]
    v: Float[np.ndarray, "B N S H"]


def record(llm: Llm, texts: Int32[np.ndarray, "B T"], layers: Sequence[int]) -> dict[int, Heads]:
    """Some layers while the model reads texts with full attention, one after another."""
    read = partial(_read, llm.config, tuple(layers), llm.weights)
    by_text = [jax.tree.map(np.asarray, read(jnp.asarray(text)[None])) for text in texts]
    stacked = jax.tree.map(lambda *arrays: np.concatenate(arrays), *by_text)
    return dict(zip(layers, stacked, strict=True))


@partial(jax.jit, static_argnums=(0, 1))
def _read(
    config: Config, layers: tuple[int, ...], weights: Weights, ids: Int32[Array, "1 T"]
) -> list[Heads]:
    def attend(
        window: int | None, spec: Spec, q: Array, k: Array, v: Array, *rest: Any
    ) -> tuple[Array, Heads]:
        at = jnp.arange(q.shape[1], dtype=jnp.uint32)[None]
        rotated = spec.encoding.rotate(q, at)[:, -QUERIES:], spec.encoding.rotate(k, at), v
        repeats = 1, q.shape[2] // k.shape[2], q.shape[2] // k.shape[2]
        pairs = zip(rotated, repeats, strict=True)
        heads = (jnp.repeat(x, times, axis=2).swapaxes(1, 2) for x, times in pairs)
        return uncached.attend(window, spec, q, k, v, *rest)[0], Heads(*heads)

    by_layer = uncached.forward(config, weights, ids, attend)[2]
    return [by_layer[layer] for layer in layers]


def weights(spec: Spec, heads: Heads) -> Float[np.ndarray, "B N Q S"]:
    """Attention weights of the last queries to every key, in float64; 0 for keys after a query."""
    logits = spec.scale * heads.q.astype(np.float64) @ heads.k.astype(np.float64).swapaxes(2, 3)
    queries, keys = logits.shape[2:]
    hidden = np.arange(keys) > np.arange(keys - queries, keys)[:, None]
    logits = np.where(hidden, -np.inf, logits)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
