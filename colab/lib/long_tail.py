"""Sparse attention to a share of the keys: a sample by weight, the top-k, or a uniform sample.

Computations and tables of the notebook on MagicPIG (arXiv 2410.16179), on a model's attention and
on synthetic attention; colab/lib/long_tail_figures.py has the plots. The experiments at full size
are evals/magicpig/sampling.py, tune_lsh.py and sparse.py.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.contract import Policy, Spec
from jaxkv.evals.magicpig import heads, matched_budgets, sparse, synthetic
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.evals.magicpig.sparse import SINKS, WINDOW, ScoredText
from jaxkv.models.llm import Llm
from jaxkv.policies import MagicPIG, Oracle, TopK, VAttention
from jaxkv.typing import Float32

SINK = 1  # first tokens that count as the sink
FIFTH = 0.2  # of the keys, as in the paper's Figure 4
KINDS = ("topk", "oracle", "uniform")
UNCENTRED = "magicpig, not centred"
PAIRS = ((10, 150), (8, 75), (6, 40), (4, 20))  # K and L; the first are the paper's
TABLES_OF_SYNTHETIC = (
    8,
    69,
)  # K and L that find 5 % of keys of random direction in synthetic.DIM dimensions
SIGMAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # standard deviations of synthetic logits
SAMPLES = 4  # of synthetic attention
MAX_LAYERS = 6  # measured layers of a model


class Measured(NamedTuple):
    """The share of the keys that was read, and the error over the norm of exact attention."""

    share: float
    error: float


class Heads(NamedTuple):
    """Query heads of some layers. layer, head [M]: their numbers; fifth [M]: the weight of the
    heaviest fifth of the keys; error [M]: relative error of each of KINDS."""

    layer: np.ndarray
    head: np.ndarray
    fifth: np.ndarray
    error: dict[str, np.ndarray]


class Synthetic(NamedTuple):
    """Synthetic attention by the deviation of its logits; fifth, error [sigmas]: as in Heads."""

    fifth: np.ndarray
    error: dict[str, np.ndarray]


def pick_layers(layers: Sequence[CapturedLayer]) -> dict[int, CapturedLayer]:
    """At most MAX_LAYERS layers, evenly spaced, including the first and the last."""
    at = np.unique(
        np.linspace(0, len(layers) - 1, min(MAX_LAYERS, len(layers))).round().astype(int)
    )
    return {n: layers[n] for n in at.tolist()}


def cumulative_weights(spec: Spec, layer: CapturedLayer) -> Float32[np.ndarray, "N S"]:
    """By query head, the total weight of the 1, 2, ... heaviest keys; mean over queries."""
    queries = heads.last_queries(spec, layer, 0, 1)
    logits = np.where(
        queries.selectable | queries.exact, np.asarray(queries.logits, np.float64), -np.inf
    )
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    _, kv_heads, group, _, size = weights.shape
    sums = np.cumsum(-np.sort(-weights, axis=-1), axis=-1).mean(axis=(0, 3))
    return sums.reshape(kv_heads * group, size).astype(np.float32)


def sink_weight(spec: Spec, layer: CapturedLayer) -> float:
    """The weight of the first token; mean over heads and queries."""
    queries = heads.last_queries(spec, layer, 0, 1)
    logits = np.where(
        queries.selectable | queries.exact, np.asarray(queries.logits, np.float64), -np.inf
    )
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return float((weights[..., :SINK].sum(-1) / weights.sum(-1)).mean())


def make_policy(kind: str, share: float, sinks: int = 0) -> Policy:
    """A policy that reads a share of all keys except the first `sinks` and the query's own."""
    ends = {"sinks": sinks, "window": 1}
    evenly = {"epsilon": 0.99, "delta": 0.99, "sides": "one"}  # no more than its set share
    make = {
        "topk": lambda: TopK(share, **ends),
        "oracle": lambda: Oracle(share, **ends),
        "uniform": lambda: VAttention(0.0, share, **evenly, **ends),
        "magicpig": lambda: MagicPIG(*TABLES_OF_SYNTHETIC, **ends, tail=matched_budgets.ROOM),
    }
    return make[kind]()


def weight_of_fifth(sums: Float32[np.ndarray, "N S"]) -> np.ndarray:
    """By query head the weight of the heaviest fifth of the keys [N]."""
    return sums[:, round(FIFTH * sums.shape[1]) - 1]


def measure_heads(
    spec: Spec, layers: Mapping[int, CapturedLayer], share: float, seeds: int
) -> Heads:
    """Every query head of these layers, with the error of each of KINDS at one share of the keys;
    means over stretches and seeds."""
    fifth = {n: weight_of_fifth(cumulative_weights(spec, layer)) for n, layer in layers.items()}
    error: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for number, layer in layers.items():
        exact = heads.exact_attention(spec, layer, f"layer {number}")
        for kind, line in error.items():
            attended = [
                heads.estimate(make_policy(kind, share), spec, layer, seed) for seed in range(seeds)
            ]
            each = [heads.errors_by_head(one.out, exact) for one in attended]
            line.append(np.mean(each, axis=(0, 1)))
    return Heads(
        np.repeat(list(fifth), [len(each) for each in fifth.values()]),
        np.concatenate([np.arange(len(each)) for each in fifth.values()]),
        np.concatenate(list(fifth.values())),
        {kind: np.concatenate(line) for kind, line in error.items()},
    )


def oracle_over_best(found: Heads) -> np.ndarray:
    """The error of `oracle` over that of the better of `topk` and `uniform` [M]."""
    return found.error["oracle"] / np.minimum(found.error["topk"], found.error["uniform"])


def pick_heads(found: Heads) -> dict[str, int]:
    """The flattest head, the head in which `oracle` gains most, and the most peaked head."""
    at = {"flattest": found.fifth.argmin(), "sample gains most": oracle_over_best(found).argmin(),
          "most peaked": found.fifth.argmax()}  # fmt: skip
    return {name: int(number) for name, number in at.items()}


def single_head(spec: Spec, layer: CapturedLayer, head: int) -> tuple[Spec, CapturedLayer]:
    """One query head of a layer, with the keys that it reads."""
    own = slice(head, head + 1), slice(head // spec.group, head // spec.group + 1)
    cut = CapturedLayer(layer.q[:, :, own[0]], layer.k[:, :, own[1]], layer.v[:, :, own[1]])
    return replace(spec, kv_heads=1, group=1), cut


def errors_by_budget(
    spec: Spec, layer: CapturedLayer, wanted: Sequence[float], seeds: int
) -> dict[str, list[Measured]]:
    """The error of a layer's attention by share of the keys, for each of KINDS."""
    exact = heads.exact_attention(spec, layer, "by budget")
    return {
        kind: [measure(make_policy(kind, share), spec, layer, exact, seeds) for share in wanted]
        for kind in KINDS
    }


def measure(
    policy: Policy, spec: Spec, layer: CapturedLayer, exact: jax.Array, seeds: int
) -> Measured:
    """Means over stretches, heads and seeds."""
    attended = [heads.estimate(policy, spec, layer, seed) for seed in range(seeds)]
    error = np.mean([heads.errors(one.out, exact) for one in attended])
    return Measured(float(np.mean([one.share for one in attended])), float(error))


def measure_synthetic(
    keys: int, sigmas: Sequence[float], share: float, follow: float, kinds: Sequence[str] = KINDS
) -> Synthetic:
    """Synthetic attention; follow: correlation of values and logits, from 0 to 1."""
    error: dict[str, list[float]] = {kind: [] for kind in kinds}
    fifth, spec = [], synthetic.SPEC
    for sigma in sigmas:
        layer = synthetic.layer(sigma, range(SAMPLES), keys, follow)
        exact = heads.exact_attention(spec, layer, "synthetic attention")
        fifth.append(weight_of_fifth(cumulative_weights(spec, layer)).mean())
        for kind, line in error.items():
            line.append(measure(make_policy(kind, share), spec, layer, exact, 1).error)
    return Synthetic(np.array(fifth), {kind: np.array(line) for kind, line in error.items()})


def measure_with_sink(keys: int, share: float) -> dict[str, dict[str, Measured]]:
    """Share read and error for synthetic keys: a cone that queries point away from, and a sink with
    half of the weight, which is either selected like other keys or always read."""
    spec, layer = synthetic.SPEC, synthetic.cone(synthetic.layer(1.0, range(SAMPLES), keys), 1.0)
    exact = heads.exact_attention(spec, layer, "a cone and a sink")
    found: dict[str, dict[str, Measured]] = {}
    for name, sinks in (("selected", 0), ("always read", SINK)):
        ways = {kind: make_policy(kind, share, sinks) for kind in (*KINDS, "magicpig")}
        if sinks:
            ways[UNCENTRED] = replace(ways["magicpig"], center=False)
        found[name] = {way: measure(p, spec, layer, exact, 1) for way, p in ways.items()}
    return found


def cosines(spec: Spec, layer: CapturedLayer, center: bool) -> np.ndarray:
    """Cosines of queries and the keys between the ends; center: with the mean key subtracted."""
    if center:
        _, found = heads.centred(spec, layer, SINKS, WINDOW)
    else:
        q, k = (np.asarray(x, np.float64) for x in heads.rotate_queries_and_keys(spec, layer))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1])
        found = np.einsum("bqkgh,bkth->bkgqt", q, k)
    between = np.broadcast_to(
        heads.last_queries(spec, layer, SINKS, WINDOW).selectable, found.shape
    )
    return np.asarray(found)[between].clip(-1, 1)


def measure_tables(
    spec: Spec, layers: Mapping[int, CapturedLayer], pairs: Sequence[tuple[int, int]], seeds: int
) -> dict[tuple[int, int, bool], Measured]:
    """Share read and error of hash tables, by K, L and whether keys are centred."""
    exact = {n: heads.exact_attention(spec, layer, "hash tables") for n, layer in layers.items()}
    found = {}
    for bits, count in pairs:
        for center in (True, False):
            policy = MagicPIG(bits, count, SINKS, WINDOW, center=center, tail=matched_budgets.ROOM)
            each = [measure(policy, spec, x, exact[n], seeds) for n, x in layers.items()]
            found[bits, count, center] = Measured(*np.mean(each, axis=0).tolist())
    return found


def policies_at_share(share: float, pair: tuple[int, int]) -> dict[str, Policy]:
    """Every method at one share of the keys between the ends, and the ends alone; pair: K and L."""
    made = matched_budgets.methods(share, pair, SINKS, WINDOW)
    shown = ("uniform", "magicpig", "topk", "oracle", "vattention")
    return {
        "ends alone": matched_budgets.EndsOnly(SINKS, WINDOW),
        **{name: made[name] for name in shown},
    }


def measure_shares(
    spec: Spec, layers: Mapping[int, CapturedLayer], policies: Mapping[str, Policy]
) -> dict[str, float]:
    """The mean share of the keys between the ends that the last queries read."""
    each = {
        name: [np.mean(heads.estimate(policy, spec, layer, n).share) for n, layer in layers.items()]
        for name, policy in policies.items()
    }
    return {name: float(np.mean(line)) for name, line in each.items()}


def measure_losses(
    llm: Llm, ids: Sequence[int], stretches: int, policies: Mapping[str, Policy]
) -> dict[str, dict[str, Any]]:
    """Loss minus full attention's on the last quarter of each stretch, with two standard errors.

    Shows no progress, because the notebook would store it.
    """
    front, size = llm.tokenizer.front, len(ids) // stretches
    cuts = [[*front, *ids[i * size : (i + 1) * size]][:size] for i in range(stretches)]
    text = ScoredText(llm, [], cuts, [])
    seeds = {name: 2 if name in matched_budgets.DRAWING else 1 for name in policies}
    with contextlib.redirect_stderr(io.StringIO()):
        base = sparse.losses(text, "full", 1, "full")
        return {
            name: sparse.excess_loss(sparse.losses(text, policy, seeds[name], name), base)
            for name, policy in policies.items()
        }


def heads_table(spec: Spec, layers: Mapping[int, CapturedLayer], found: Heads) -> str:
    """By layer: tails of its heads, and the number of heads in which each of KINDS is best."""
    best = np.array(KINDS)[np.argmin([found.error[kind] for kind in KINDS], axis=0)]
    lines = ["        weight of the     of the     heads with the lowest error for"]
    lines.append(f"layer   heaviest fifth   1st token{KINDS[0]:>8}{KINDS[1]:>9}{KINDS[2]:>10}")
    for number, layer in layers.items():
        own = found.layer == number
        fifth, counts = found.fifth[own], [(best[own] == kind).sum() for kind in KINDS]
        lines.append(
            f"{number:5}{fifth.min():9.0%} to {fifth.max():4.0%}{sink_weight(spec, layer):12.1%}"
            f"{counts[0]:8}{counts[1]:9}{counts[2]:10}"
        )
    return "\n".join(lines)


def sink_table(found: Mapping[str, Mapping[str, Measured]]) -> str:
    """Share read and error by policy, with the sink selected or always read."""
    lines = [f"{'':23}" + "".join(f"{'sink ' + name:>21}" for name in found)]
    lines.append(f"{'':23}" + f"{'read':>12}{'error':>9}" * len(found))
    for way in list(found.values())[-1]:
        cells = (
            f"{each[way].share:12.2%}{each[way].error:9.3f}" if way in each else " " * 21
            for each in found.values()
        )  # fmt: skip
        lines.append(f"{way:23}" + "".join(cells))
    return "\n".join(lines)


def lsh_table(found: Mapping[tuple[int, int, bool], Measured]) -> str:
    """Share read and error by K and L, with and without centring."""
    lines = [f"{'':8}{'centred keys':>22}{'uncentred keys':>22}"]
    lines.append(f"{'K':>3}{'L':>5}" + f"{'read':>13}{'error':>9}" * 2)
    for bits, count, center in found:
        if center:
            both = (found[bits, count, each] for each in (True, False))
            cells = (f"{one.share:13.1%}{one.error:9.3f}" for one in both)
            lines.append(f"{bits:3}{count:5}" + "".join(cells))
    return "\n".join(lines)


def loss_table(after_prompt: Mapping[str, Mapping[str, Any]], read: Mapping[str, float]) -> str:
    """By policy: share of the keys between the ends that it reads, and loss minus full's."""
    lines = [f"{'':12}{'keys read':>11}   loss minus full attention's ± two standard errors"]
    for name, over in after_prompt.items():
        lines.append(f"{name:12}{read[name]:11.1%}{over['mean']:+11.4f}"
                     f" ± {over['two_errors']['stretches']:.4f}")  # fmt: skip
    return "\n".join(lines)
