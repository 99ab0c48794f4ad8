"""Sparse attention to a share of the keys: a sample by weight, the top-k, or a uniform sample.

Computations and tables of the notebook on MagicPIG (arXiv 2410.16179), on a model's attention and
on synthetic attention; colab/lib/long_tail_figures.py has the plots. The experiments at full size
are evals/magicpig/sampling.py, tune_lsh.py and sparse_losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv.colab.captured import attention_weights, sink_weight
from jaxkv.contract import Policy, Spec
from jaxkv.evals.magicpig import heads, matched_budgets, synthetic
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.policies import MagicPIG, Oracle, TopK, VAttention
from jaxkv.typing import Float32

SINK = 1  # first tokens that count as the sink
FIFTH = 0.2  # of the keys, as in the paper's Figure 4
KINDS = ("topk", "oracle", "uniform")
CENTRED, UNCENTRED = "magicpig", "magicpig, not centred"
PAIRS = ((10, 150), (8, 75), (6, 40), (4, 20))  # K and L; the first are the paper's
TABLES_OF_SYNTHETIC = (
    8,
    69,
)  # K and L that find 5 % of keys of random direction in synthetic.DIM dimensions
SIGMAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # standard deviations of synthetic logits
SAMPLES = 4  # of synthetic attention


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


def cumulative_weights(spec: Spec, layer: CapturedLayer) -> Float32[np.ndarray, "N S"]:
    """By query head, the total weight of the 1, 2, ... heaviest keys; mean over queries."""
    weights = attention_weights(spec, layer)
    sums = np.cumsum(-np.sort(-weights, axis=-1), axis=-1).mean(axis=(0, 3))
    return sums.reshape(-1, sums.shape[-1]).astype(np.float32)


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
            errors = [heads.errors_by_head(estimate.out, exact) for estimate in attended]
            line.append(np.mean(errors, axis=(0, 1)))
    return Heads(
        np.repeat(list(fifth), [len(weights) for weights in fifth.values()]),
        np.concatenate([np.arange(len(weights)) for weights in fifth.values()]),
        np.concatenate(list(fifth.values())),
        {kind: np.concatenate(line) for kind, line in error.items()},
    )


def oracle_over_best(measured: Heads) -> np.ndarray:
    """The error of `oracle` over that of the better of `topk` and `uniform` [M]."""
    return measured.error["oracle"] / np.minimum(measured.error["topk"], measured.error["uniform"])


def pick_heads(measured: Heads) -> dict[str, int]:
    """The flattest head, the head after the first layer in which `oracle` gains most, and the most
    peaked head."""
    later = np.where(measured.layer > measured.layer.min(), oracle_over_best(measured), np.inf)
    at = {"flattest": measured.fifth.argmin(), "sample gains most": later.argmin(),
          "most peaked": measured.fifth.argmax()}  # fmt: skip
    return {name: int(number) for name, number in at.items()}


def single_head(spec: Spec, layer: CapturedLayer, head: int) -> tuple[Spec, CapturedLayer]:
    """One query head of a layer, with the keys that it reads."""
    span = slice(head, head + 1), slice(head // spec.group, head // spec.group + 1)
    cut = CapturedLayer(layer.q[:, :, span[0]], layer.k[:, :, span[1]], layer.v[:, :, span[1]])
    return replace(spec, kv_heads=1, group=1), cut


def errors_by_budget(
    spec: Spec, layer: CapturedLayer, shares: Sequence[float], seeds: int
) -> dict[str, list[Measured]]:
    """The error of a layer's attention by share of the keys, for each of KINDS."""
    exact = heads.exact_attention(spec, layer, "by budget")
    return {
        kind: [measure(make_policy(kind, share), spec, layer, exact, seeds) for share in shares]
        for kind in KINDS
    }


def measure(
    policy: Policy, spec: Spec, layer: CapturedLayer, exact: jax.Array, seeds: int
) -> Measured:
    """Means over stretches, heads and seeds."""
    attended = [heads.estimate(policy, spec, layer, seed) for seed in range(seeds)]
    error = np.mean([heads.errors(estimate.out, exact) for estimate in attended])
    return Measured(float(np.mean([estimate.share for estimate in attended])), float(error))


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


def measure_with_sink(
    spec: Spec, layer: CapturedLayer, share: float, pair: tuple[int, int], seeds: int
) -> dict[str, dict[str, Measured]]:
    """Share read and error if the first token is selected like other keys, or always read.

    pair: K and L of the hash tables.
    """
    exact = heads.exact_attention(spec, layer, "a layer with a sink")
    by_sink: dict[str, dict[str, Measured]] = {}
    for name, sinks in (("selected", 0), ("always read", SINK)):
        ways: dict[str, Policy] = {kind: make_policy(kind, share, sinks) for kind in KINDS}
        ways[CENTRED] = hash_tables(pair, sinks, center=True)
        if sinks:
            ways[UNCENTRED] = hash_tables(pair, sinks, center=False)
        by_sink[name] = {way: measure(p, spec, layer, exact, seeds) for way, p in ways.items()}
    return by_sink


def hash_tables(pair: tuple[int, int], sinks: int, center: bool) -> MagicPIG:
    """MagicPIG with K and L that reads only the query's own key besides the sinks."""
    return MagicPIG(*pair, sinks, 1, center=center, tail=matched_budgets.ROOM)


def cosines(spec: Spec, layer: CapturedLayer, center: bool) -> np.ndarray:
    """Cosines of queries and the keys after the sink; center: with the mean key subtracted."""
    if center:
        _, products = heads.centred(spec, layer, SINK, 1)
    else:
        q, k = (np.asarray(x, np.float64) for x in heads.rotate_queries_and_keys(spec, layer))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1])
        products = np.einsum("bqkgh,bkth->bkgqt", q, k)
    between = np.broadcast_to(heads.last_queries(spec, layer, SINK, 1).selectable, products.shape)
    return np.asarray(products)[between].clip(-1, 1)


def measure_tables(
    spec: Spec, layers: Mapping[int, CapturedLayer], pairs: Sequence[tuple[int, int]], seeds: int
) -> dict[tuple[int, int, bool], Measured]:
    """Share read and error of hash tables beside the sink, by K, L and whether keys are centred."""
    exact = {n: heads.exact_attention(spec, layer, "hash tables") for n, layer in layers.items()}
    tables = {}
    for bits, count in pairs:
        for center in (True, False):
            policy = hash_tables((bits, count), SINK, center)
            by_layer = [measure(policy, spec, x, exact[n], seeds) for n, x in layers.items()]
            tables[bits, count, center] = Measured(*np.mean(by_layer, axis=0).tolist())
    return tables


def measure_shares(
    spec: Spec, layers: Mapping[int, CapturedLayer], policies: Mapping[str, Policy]
) -> dict[str, float]:
    """The mean share of the keys between the ends that the last queries read."""
    shares = {
        name: [np.mean(heads.estimate(policy, spec, layer, n).share) for n, layer in layers.items()]
        for name, policy in policies.items()
    }
    return {name: float(np.mean(line)) for name, line in shares.items()}


def heads_table(spec: Spec, layers: Mapping[int, CapturedLayer], measured: Heads) -> str:
    """By layer: tails of its heads, and the number of heads in which each of KINDS is best."""
    best = np.array(KINDS)[np.argmin([measured.error[kind] for kind in KINDS], axis=0)]
    lines = ["        weight of the     of the     heads with the lowest error for"]
    lines.append(f"layer   heaviest fifth   1st token{KINDS[0]:>8}{KINDS[1]:>9}{KINDS[2]:>10}")
    for number, layer in layers.items():
        in_layer = measured.layer == number
        fifth, counts = measured.fifth[in_layer], [(best[in_layer] == kind).sum() for kind in KINDS]
        lines.append(
            f"{number:5}{fifth.min():9.0%} to {fifth.max():4.0%}{sink_weight(spec, layer):12.1%}"
            f"{counts[0]:8}{counts[1]:9}{counts[2]:10}"
        )
    return "\n".join(lines)


def geometry_table(
    spec: Spec, layers: Mapping[int, CapturedLayer], geometry: Mapping[int, Mapping[str, Any]]
) -> str:
    """By layer: weight of the first token, cosines of its key, and the length of its value."""
    columns = ("sink key with mean key", "query with sink key", "query with mean key",
               "value of the sink over others")  # fmt: skip
    lines = ["         weight of      cosine of the first key     query and   length of the first"]
    lines.append("layer    1st token    and mean key   and query     mean key    value over others")
    for number, layer in layers.items():
        means = [geometry[number][name]["mean"] for name in columns]
        cells = (f"{x:{width}.2f}" for x, width in zip(means, (14, 13, 13, 18), strict=True))
        lines.append(f"{number:5}{sink_weight(spec, layer):12.0%}" + "".join(cells))
    return "\n".join(lines)


def sink_table(by_sink: Mapping[str, Mapping[str, Measured]]) -> str:
    """Share read and error by policy, with the sink selected or always read."""
    lines = [f"{'':23}" + "".join(f"{'sink ' + name:>21}" for name in by_sink)]
    lines.append(f"{'':23}" + f"{'read':>12}{'error':>9}" * len(by_sink))
    for way in list(by_sink.values())[-1]:
        cells = (
            f"{ways[way].share:12.2%}{ways[way].error:9.3f}" if way in ways else " " * 21
            for ways in by_sink.values()
        )  # fmt: skip
        lines.append(f"{way:23}" + "".join(cells))
    return "\n".join(lines)


def lsh_table(tables: Mapping[tuple[int, int, bool], Measured]) -> str:
    """Share read and error by K and L, with and without centring."""
    lines = [f"{'':8}{'centred keys':>22}{'uncentred keys':>22}"]
    lines.append(f"{'K':>3}{'L':>5}" + f"{'read':>13}{'error':>9}" * 2)
    for bits, count, center in tables:
        if center:
            pair = (tables[bits, count, centred] for centred in (True, False))
            cells = (f"{measured.share:13.1%}{measured.error:9.3f}" for measured in pair)
            lines.append(f"{bits:3}{count:5}" + "".join(cells))
    return "\n".join(lines)
