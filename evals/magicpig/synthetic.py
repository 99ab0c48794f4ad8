"""Synthetic attention and the error of sparse attention to it (MagicPIG, Figures 3 to 5).

Keys have random directions, logits are normal with standard deviation sigma. Values have a nonzero
mean and a part that correlates with the logit, so that top-k drops values unlike those it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws
from jaxkv.contract import Chunk, Spec
from jaxkv.evals.lib.record import spread
from jaxkv.evals.magicpig.heads import attend, progress
from jaxkv.evals.magicpig.inclusion import isotropic
from jaxkv.evals.magicpig.matched_budgets import methods
from jaxkv.policies import MagicPIG, Oracle, TopK
from jaxkv.policies.magicpig import policy as magicpig
from jaxkv.policies.sparse_attention import base as sparse_attention
from jaxkv.policies.sparse_attention.base import Candidates
from jaxkv.rotary import NoPosition

KEYS, DIM = 16_384, 64
TABLES = ((10, 150), (9, 120), (8, 75))  # K and L as published
CORRELATION = 0.45  # of a value's component along one direction with its logit
SPEC = Spec(1, DIM, 1.0, NoPosition())


class Drawing(NamedTuple):
    """One query's logits [S], the keys [S,H] they come from, and values [S,H]."""

    logits: np.ndarray
    k: np.ndarray
    v: np.ndarray


def draw(sigma: float, seed: int) -> Drawing:
    """v = m + r (s / sigma) e + sqrt(1 - r^2) z with normal m and z; s is sigma times a key's first
    coordinate, r is CORRELATION."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(KEYS, DIM))
    mean, along = rng.normal(size=(2, DIM))
    noise = rng.normal(size=(KEYS, DIM)) * (1 - CORRELATION**2) ** 0.5
    v = mean + CORRELATION * k[:, :1] * along + noise
    return Drawing(*(a.astype(np.float32) for a in (sigma * k[:, 0], k, v)))


def queries(logits: np.ndarray | jax.Array, seed: int | jax.Array) -> Candidates:
    """One query with these keys as candidates; no key is always attended."""
    between, at = jnp.ones((1, 1, 1, 1, len(logits)), bool), jnp.zeros((1, 1), jnp.uint32)
    none = jnp.zeros((1, 1, len(logits), 0), jnp.float32)
    rng = draws.seeds(jax.random.key(seed), SPEC, 1)
    places = jnp.arange(len(logits), dtype=jnp.uint32)[None]
    logits = jnp.asarray(logits)[None, None, None, None]
    return Candidates(logits, ~between, between, none[:, :, :1], none, at, places, rng)


@partial(jax.jit, static_argnums=0)
def error(
    chosen: TopK | Oracle, drawing: Drawing, seed: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """|estimate - exact| / |exact| of one query, and the share of the keys that was read."""
    candidates, v = queries(drawing.logits, seed), jnp.asarray(drawing.v)[None, :, None]
    exact = attend(candidates, sparse_attention.unweighted(candidates.selectable), v).out
    estimate = attend(candidates, chosen.select(candidates), v)
    return jnp.linalg.norm(estimate.out - exact) / jnp.linalg.norm(exact), estimate.share[0]


@partial(jax.jit, static_argnums=0)
def error_of_tables(
    chosen: MagicPIG, sigma: jax.Array | float, drawing: Drawing, seed: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The same for hash tables; the newest key is the query's own."""
    count = len(drawing.k)
    at = jnp.arange(count, dtype=jnp.uint32)[None]
    k, v = (jnp.asarray(a)[None, :, None] for a in (drawing.k, drawing.v))
    q = jnp.asarray(sigma, jnp.float32) * jnp.eye(1, DIM, dtype=jnp.float32)[None]
    prompt = Chunk(k, k, v, at, jnp.ones((1, count), bool))
    state = chosen.reserve(SPEC, chosen.init(SPEC, 1, jax.random.key(seed)), count)
    state = chosen.finish_prefill(SPEC, chosen.update(SPEC, state, prompt)[1])
    last, number = at[:, -1:], jnp.full((1, 1), count - 1, jnp.int32)
    out = chosen.attend_after_prefill(SPEC, state, q[:, None], number, last).out
    selected = magicpig.find(state, chosen.settings, chosen.budget, q, number[:, 0], last[:, 0])
    candidates = queries(drawing.logits, seed)
    exact = attend(candidates, sparse_attention.unweighted(candidates.selectable), v).out
    share = selected.total[0, 0].astype(jnp.float32) / np.float32(count)
    return jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact), share


def by_budget(sigma: float, shares: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """The spread of each error over drawings, and the share at which the errors cross."""
    drawings = [draw(sigma, seed) for seed in seeds]
    by_method: dict[str, Any] = {"topk": {}, "oracle": {}}
    for share in progress(shares, f"synthetic attention, sigma {sigma:g}"):
        for name, chosen in (("topk", TopK(share)), ("oracle", Oracle(share))):
            by_method[name][f"{share:g}"] = _summary(partial(error, chosen), drawings, seeds)
    return by_method | {
        "crossing": crossing(by_method), "mass_of_top_fifth": mass_of_top_fifth(drawings),
        "by_tables": by_tables(sigma, drawings, seeds),
    }  # fmt: skip


def by_tables(
    sigma: float, drawings: Sequence[Drawing], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """MagicPIG as published, and other methods at its expected share."""
    lines = []
    for bits, tables in progress(TABLES, f"synthetic attention, sigma {sigma:g}, by tables"):
        share = isotropic(bits, tables, DIM)
        policies = methods(share, (bits, tables), 0, 1)
        chosen = MagicPIG(bits, tables, 0, 1, budget=KEYS, tail=1)
        line = {"magicpig": _summary(partial(error_of_tables, chosen, sigma), drawings, seeds)}
        for name in ("topk", "oracle", "uniform"):
            line[name] = _summary(partial(error, policies[name]), drawings, seeds)
        lines.append({"K": bits, "L": tables, "expected": share} | line)
    return lines


def _summary(
    find: Callable[[Drawing, int], tuple[jax.Array, jax.Array]],
    drawings: Sequence[Drawing], seeds: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    pairs = np.array(
        [find(*arguments) for arguments in zip(drawings, seeds, strict=True)], np.float64
    )
    return {"error": spread(pairs[:, 0]), "share": pairs[:, 1].mean()}


def mass_of_top_fifth(drawings: Sequence[Drawing]) -> float:
    """The share of the weight that the heaviest fifth of the keys has."""
    weights = [np.sort(np.exp(drawing.logits.astype(np.float64)))[::-1] for drawing in drawings]
    return float(np.mean([w[: round(0.2 * len(w))].sum() / w.sum() for w in weights]))


def crossing(by_method: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The share from which top-k has a lower error than oracle sampling, interpolated linearly in
    the log errors; None if it never has."""
    shares = [float(share) for share in by_method["topk"]]
    middle = lambda line: line["error"].get("median", line["error"].get("mean"))
    over = [
        np.log(max(middle(a), 1e-12)) - np.log(max(middle(b), 1e-12))
        for a, b in zip(by_method["topk"].values(), by_method["oracle"].values(), strict=True)
    ]
    later = [i for i in range(len(over)) if all(x < 0 for x in over[i:])]
    if not later:
        return None
    if later[0] == 0:
        return shares[0]
    (a, b), (x, y) = over[later[0] - 1 : later[0] + 1], shares[later[0] - 1 : later[0] + 1]
    return float(x + (y - x) * a / (a - b))
