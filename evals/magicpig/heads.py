"""Captured layers: queries, keys and values of a model, and sparse attention to them.

The last tokens of every stretch of text are the queries. A query attends exactly to both ends, and
to a selection of the keys between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws
from jaxkv.attention import blend, scores
from jaxkv.cli.progress import show_progress
from jaxkv.contract import Spec
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import standard_error
from jaxkv.evals.lib.run import Run, flag
from jaxkv.evals.lib.text import stretches_of
from jaxkv.models.generation.decoding import embed
from jaxkv.models.generation.shared_prompt import run_recorded
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.decoder import layer_weights
from jaxkv.policies.sparse_attention.base import Candidates, unweighted

Item = TypeVar("Item")
QUERIES, CHUNK = 64, 256  # last tokens of a stretch, tokens that are read at a time
SINKS, WINDOW = 4, 64  # ends that every query attends to
FLAGS = (
    flag("--text", type=Path, required=True, nargs="+",
         about="texts, or a folder of books, which is one text"),
    flag("--tokens", type=int, about="of a stretch (default: the model's context)"),
    flag("--layers", type=int, nargs="+", about="default: first, middle, last"),
    flag("--stretches", 8, "of all texts, as many of each; an interval is over them", minimum=2),
)  # fmt: skip


class CapturedLayer(NamedTuple):
    """q [B,T,N,H], k, v [B,T,K,H] of one layer and B stretches, before rotation."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Estimate(NamedTuple):
    """out [B,Q,N,H] of Q queries. share [B]: fraction of the keys between that was read."""

    out: jax.Array
    share: jax.Array


def captured_layers(run: Run, after: int = 0, minimum: int = 0) -> dict[int, CapturedLayer]:
    """Some layers of the model, by number, on the stretches that FLAGS describe.

    Without --layers: the first, the middle and the last. after: tokens of a stretch besides
    --tokens. minimum: the fewest --tokens. Adds the texts to the record.
    Raises UserError where the model has no such layer, or too short a context.
    """
    options, config = run.options, run.llm.config
    last, tokens = config.layers - 1, options.tokens or config.context - after
    if not minimum <= tokens <= config.context - after:
        raise UserError(
            f"--tokens must be at least {minimum} and at most {config.context - after}, which the "
            f"trained context of {run.llm.name} allows, got {tokens}; give another"
        )
    numbers = sorted(set(options.layers or (0, last // 2, last)))
    if not 0 <= numbers[0] <= numbers[-1] <= last:
        raise UserError(f"--layers must be from 0 to {last}, got {numbers}; give others")
    ids, files = stretches_of(run.llm, options.text, options.stretches, tokens + after)
    run.record.add(files)
    return dict(zip(numbers, layers_of(run.llm, ids, options.stretches, numbers), strict=True))


def layers_of(
    llm: Llm, ids: Sequence[int], stretches: int, chosen: Sequence[int]
) -> list[CapturedLayer]:
    """The chosen layers, recorded while the model read each stretch separately."""
    length = len(ids) // stretches
    cuts = [ids[i * length : (i + 1) * length] for i in range(stretches)]
    every = (capture(llm, cut) for cut in progress(cuts, "reading stretches"))
    seen = [[captured[layer] for layer in chosen] for captured in every]
    stack = lambda *stretches: jnp.asarray(np.stack(stretches), jnp.float32)
    return [CapturedLayer(*map(stack, *arrays)) for arrays in zip(*seen, strict=True)]


def capture(llm: Llm, ids: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """q, k, v [T,*,H] of every layer, before rotation."""
    # Beyond the trained context, full attention fails; a streaming cache does not.
    window = llm.config.context // 2 - 4
    within = len(ids) <= llm.config.context
    policy = f"full:max={len(ids)}" if within else f"streaming:sinks=4,window={window}"
    stream = Stream(llm, policy, tokens=len(ids))
    stream.reserve(len(ids))
    positions = jnp.arange(len(ids), dtype=jnp.uint32)[None]
    valid, tokens = jnp.ones(positions.shape, bool), np.asarray([ids], np.int32)
    parts = [slice(at, at + CHUNK) for at in range(0, len(ids), CHUNK)]
    x = [embed(stream.static.of_model, llm.weights, tokens[:, part]) for part in parts]
    layers = []
    for number, layer in enumerate(zip(stream.policies, stream.decoding.states, strict=True)):
        (layer_policy, state), seen = layer, []
        for place, part in enumerate(parts):
            x[place], state, attended = run_recorded(
                llm.config, layer_policy, layer_weights(llm.weights, number), x[place], state,
                positions[:, part], valid[:, part],
            )  # fmt: skip
            seen.append(attended)
        layers.append(tuple(np.concatenate([a[i][0] for a in seen]) for i in range(3)))
    return layers


def rotate_queries_and_keys(spec: Spec, layer: CapturedLayer) -> tuple[jax.Array, jax.Array]:
    """The last queries [B,Q,N,H] and all keys [B,K,T,H], rotated to their positions."""
    at = positions_of(layer)
    q = spec.encoding.rotate(layer.q[:, -QUERIES:], at[:, -QUERIES:])
    return q, spec.encoding.rotate(layer.k, at).transpose(0, 2, 1, 3)


def positions_of(layer: CapturedLayer) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(layer.k.shape[1], dtype=jnp.uint32), layer.k.shape[:2])


def last_queries(
    spec: Spec, layer: CapturedLayer, sinks: int, window: int, seed: jax.Array | int = 0
) -> Candidates:
    """The last queries with their keys; without sinks and window every key is a candidate."""
    q, k = rotate_queries_and_keys(spec, layer)
    at = positions_of(layer)
    query_at, slot = at[:, -QUERIES:, None], at[:, None]
    logits = scores(q, k, spec.scale, spec.softcap)
    penalty = spec.encoding.bias(at[:, -QUERIES:], at, k.shape[1])
    causal = (slot <= query_at)[:, None, None]
    ends = ((slot < sinks) | (slot + np.uint32(window) > query_at))[:, None, None]
    rng = draws.seeds(jax.random.key(seed), spec, len(q))
    logits = logits if penalty is None else logits + penalty
    return Candidates(logits, causal & ends, causal & ~ends, q, k, at[:, -QUERIES:], at, rng)


def attend(queries: Candidates, weights: jax.Array, v: jax.Array) -> Estimate:
    """Attention to the ends, and to the keys between with log weights [B,K,G,Q,T]."""
    bias = jnp.where(queries.exact, np.float32(0), weights)
    read = jnp.sum((weights > -jnp.inf) & queries.selectable, axis=(1, 2, 3, 4))
    heads = np.float32(weights.shape[1] * weights.shape[2])
    between = heads * jnp.sum(queries.selectable, axis=(1, 2, 3, 4)).astype(jnp.float32)
    share = read.astype(jnp.float32) / between
    return Estimate(blend(queries.logits + bias, v.transpose(0, 2, 1, 3)).out, share)


@partial(jax.jit, static_argnums=0)
def centred(
    spec: Spec, layer: CapturedLayer, sinks: int, window: int
) -> tuple[jax.Array, jax.Array]:
    """Keys [B,K,T,H] minus the mean key between the prompt's ends, as MagicPIG hashes them; and
    their cosines [B,K,G,Q,T] with the queries."""
    q, k = rotate_queries_and_keys(spec, layer)
    slot = jnp.arange(k.shape[2])
    prompt = (slot >= sinks) & (slot < k.shape[2] - QUERIES - window)
    share = prompt.astype(jnp.float32) / jnp.maximum(1, jnp.sum(prompt)).astype(jnp.float32)
    mean = jnp.einsum("t,bkth->bkh", share, k, precision="highest")
    k = k - mean[:, :, None]
    unit = lambda a: a / jnp.maximum(jnp.linalg.norm(a, axis=-1, keepdims=True), 1e-30)
    return k, scores(unit(q), unit(k), 1.0)


def errors(estimates: jax.Array, exact: jax.Array) -> np.ndarray:
    """|estimates - exact| / |exact| of each stretch [B]; the mean over query heads."""
    norm = lambda a: np.sqrt((np.asarray(a, np.float64) ** 2).sum(axis=(1, 3)))
    return (norm(estimates - exact) / norm(exact)).mean(axis=1)


def interval(values: np.ndarray) -> dict[str, float]:
    """The mean over [...,B] and its standard error over the B stretches, which are independent;
    layers and seeds of one stretch are not."""
    stretch_means = values.reshape(-1, values.shape[-1]).mean(axis=0)
    return {"mean": stretch_means.mean(), "standard_error": standard_error(stretch_means)}


def progress(items: Iterable[Item], title: str) -> Iterator[Item]:
    """The same items, with a line of progress on stderr."""
    items = list(items)
    with show_progress(title, len(items), "parts") as report:
        for number, item in enumerate(items, 1):
            yield item
            report(number)


@partial(jax.jit, static_argnums=0)
def _full_attention(spec: Spec, layer: CapturedLayer) -> jax.Array:
    queries = last_queries(spec, layer, SINKS, WINDOW)
    return attend(queries, unweighted(queries.selectable), layer.v).out


def exact_attention(spec: Spec, layer: CapturedLayer, title: str) -> jax.Array:
    """Full attention of the last queries [B,Q,N,H]. Raises SystemExit if it is not finite."""
    exact = _full_attention(spec, layer)
    if not np.isfinite(np.asarray(exact)).all():
        raise SystemExit(f"{title}: attention to everything is not finite; nothing is compared")
    return exact
