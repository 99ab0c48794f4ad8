"""Balanced and random samples of keys: halves of points in a plane, and synthetic prompts."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.policies.discrepancy import Halving, walk
from jaxkv.rotary import NoPosition
from jaxkv.typing import Array, Bool, Float, Int32

SIZES, NOISE = (24, 20, 16, 24, 12), 0.25  # points per cluster; deviation from its centre
CENTRES = np.array([(0, 2.4), (2.28, 0.74), (1.41, -1.94), (-1.41, -1.94), (-2.28, 0.74)])
PLANE = Halving("walk", key_scale=0.5)

# Of synthetic prompts: tokens to compress, last tokens that stay, queries, head dim, heads.
BETWEEN, WINDOW, QUERIES, DIM, HEADS = 1024, 32, 64, 64, 4
KINDS = 32  # of keys, in "kinds, mixed"
HEAVY, LEAD = 8, 9.0  # number of heavy keys; by how much their logits are higher
PROMPTS = ("neighbours alike", "kinds, mixed", "nothing alike", "a few heavy keys")
SPEC = Spec(HEADS, DIM, DIM**-0.5, NoPosition(), group=1)


class Halves(NamedTuple):
    """Points in a plane and their clusters. is_kept, norms: by method and draw; norms of the
    signed sum after each point, over the norm of one vector."""

    points: Float[np.ndarray, "S 2"]
    clusters: Int32[np.ndarray, " S"]
    is_kept: dict[str, Bool[np.ndarray, "D S"]]
    norms: dict[str, Float[np.ndarray, "D S"]]


def halve_points(draws: int, seed: int) -> Halves:
    """Points of several clusters in random order, halved by coins and by BalanceKV's walk."""
    random = np.random.default_rng(seed)
    clusters = random.permutation(np.repeat(np.arange(len(SIZES), dtype=np.int32), SIZES))
    points = CENTRES[clusters] + NOISE * random.normal(size=(len(clusters), 2))
    uniforms = jnp.asarray(random.random((draws, len(points))), jnp.float32)
    keys = jnp.broadcast_to(jnp.asarray(points, jnp.float32), (draws, *points.shape))
    values, valid = jnp.ones((*uniforms.shape, 1), jnp.float32), jnp.ones(uniforms.shape, bool)
    signs = {
        "random": np.where(random.random(uniforms.shape) < 0.5, 1, -1),
        "balanced": np.asarray(walk(PLANE, 1.0, keys, values, uniforms, valid)[1]),
    }
    norms = {name: norms_of_sums(points, sign) for name, sign in signs.items()}
    return Halves(points, clusters, {name: sign > 0 for name, sign in signs.items()}, norms)


def norms_of_sums(points: Float[np.ndarray, "S 2"], signs: np.ndarray) -> Float[np.ndarray, "D S"]:
    """Norm of the sum of sign x vector after each point, over the RMS norm of one vector.

    The vectors are those of the walk: their inner products are exp(key_scale <a, b>). signs: [D,S].
    """
    centred = points - points.mean(axis=0)
    products = np.exp(PLANE.key_scale * centred @ centred.T)
    terms = signs[:, :, None] * signs[:, None] * products
    squares = np.diagonal(np.cumsum(np.cumsum(terms, axis=1), axis=2), axis1=1, axis2=2)
    return np.sqrt(np.maximum(squares, 0) / np.diag(products).mean())


def synthetic_prompt(name: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v [T,N,H] of a prompt and the queries after it; coordinates have unit variance.

    name: one of PROMPTS.
    """
    random = np.random.default_rng(seed)
    tokens = BETWEEN + WINDOW + QUERIES
    q, k, v = random.normal(size=(3, tokens, HEADS, DIM))
    if name == "neighbours alike":
        for i in range(1, tokens):
            k[i], v[i] = (0.95 * a[i - 1] + (1 - 0.95**2) ** 0.5 * a[i] for a in (k, v))
    elif name == "kinds, mixed":
        kinds = random.normal(size=(2, KINDS, HEADS, DIM))[:, random.integers(0, KINDS, tokens)]
        k, v = (0.96 * kind + 0.28 * noise for kind, noise in zip(kinds, (k, v), strict=True))
    elif name == "a few heavy keys":  # all queries share a direction with these keys
        q = q + 1.0
        k[random.choice(BETWEEN, HEAVY, replace=False)] += LEAD / DIM**0.5
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def errors(policies: dict[str, str], name: str, seed: int) -> dict[str, float]:
    """By method, the relative error of the queries after a prompt that its policy compressed."""
    prompt = tuple(map(jnp.asarray, synthetic_prompt(name, seed)))
    outputs = {
        method: np.asarray(_attend(jaxkv.policy(text), prompt, jnp.uint32(seed)), np.float64)
        for method, text in ({"exact": "full"} | policies).items()
    }
    exact = outputs.pop("exact")
    norm = lambda x: np.sqrt((x**2).sum(axis=(0, 2)))
    return {
        method: float((norm(output - exact) / norm(exact)).mean())
        for method, output in outputs.items()
    }


@partial(jax.jit, static_argnums=0)
def _attend(policy: Policy, prompt: tuple[Array, Array, Array], seed: Array) -> Array:
    """The output [Q,N,H] of the queries after the end of prefill."""
    tokens = len(prompt[0]) - QUERIES
    arrays = *prompt, jnp.arange(len(prompt[0]), dtype=jnp.uint32), jnp.ones(len(prompt[0]), bool)
    before, after = (
        Chunk(*(array[None, part] for array in arrays))
        for part in (slice(tokens), slice(tokens, None))
    )
    state = policy.reserve(SPEC, policy.init(SPEC, 1, jax.random.key(seed)), tokens + QUERIES)
    _, state = policy.update(SPEC, state, before)
    if policy.min_prompt is not None:
        state = policy.reserve(SPEC, policy.finish_prefill(SPEC, state), QUERIES)
    return policy.update(SPEC, state, after)[0].out[0]
