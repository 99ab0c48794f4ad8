"""Computations and plots of notebook 03: prompt compression by balance and by random samples.

Halving of points in a plane, the attention error in the layers of a model and on synthetic keys,
and the time that compression takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.colab.captured import attention_weights, sink_weight
from jaxkv.contract import Spec
from jaxkv.evals.balancekv import single_layer
from jaxkv.evals.balancekv.single_layer import ENDS, METHODS, QUERIES, attend, relative_error
from jaxkv.evals.lib import timing
from jaxkv.evals.lib.figures import draw_spreads
from jaxkv.evals.lib.record import spread
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.models.generation.decoding import finish_prefill_layer
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COMPRESSION
from jaxkv.policies.discrepancy import Halving, walk
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import NoPosition

SIZES, NOISE = (24, 20, 16, 24, 12), 0.25  # points per cluster; deviation from its centre
CENTRES = np.array([(0, 2.4), (2.28, 0.74), (1.41, -1.94), (-1.41, -1.94), (-2.28, 0.74)])
PLANE = Halving("walk", key_scale=0.5)
# Of synthetic prompts: keys to compress, last keys that stay, head dim, heads.
BETWEEN, WINDOW, DIM, HEADS = 1024, 32, 64, 4
KINDS = 32  # of keys, in "kinds, mixed"
HEAVY, LEAD = 8, 9.0  # number of heavy keys; by how much their logits are higher
SYNTHETIC = ("neighbours alike", "kinds, mixed", "nothing alike", "a few heavy keys")
SPEC = Spec(HEADS, DIM, DIM**-0.5, NoPosition(), group=1)
COMPARED = ("balance, pairs", "stratified", "uniform, weighted", "uniform", "snapkv")
ALL = ("balance, walk", *COMPARED)
Errors = dict[str, list[float]]  # by method, one per seed


class Halves(NamedTuple):
    """Points [S,2] and their clusters [S], halved by each method.

    lengths [draws,S]: norm of the signed sum after each point. signs [S]: of the draw whose final
    norm is the median.
    """

    points: np.ndarray
    group: np.ndarray
    signs: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]


def halve_points(draws: int, seed: int = 0) -> Halves:
    """Points of several clusters in random order, with signs from coins and from BalanceKV's walk.

    draws: number of repetitions.
    """
    random = np.random.default_rng(seed)
    group = random.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    points = CENTRES[group] + NOISE * random.normal(size=(len(group), 2))
    uniforms = jnp.asarray(random.random((draws, len(points))), jnp.float32)
    keys = jnp.broadcast_to(jnp.asarray(points, jnp.float32), (draws, *points.shape))
    values, valid = jnp.ones((*uniforms.shape, 1), jnp.float32), jnp.ones(uniforms.shape, bool)
    signs = {
        "random": np.where(random.random(uniforms.shape) < 0.5, 1, -1),
        "balanced": np.asarray(walk(PLANE, 1.0, keys, values, uniforms, valid)[1]),
    }
    lengths = {name: signed_lengths(points, sign) for name, sign in signs.items()}
    middle = {name: np.argsort(norms[:, -1])[draws // 2] for name, norms in lengths.items()}
    return Halves(points, group, {name: signs[name][at] for name, at in middle.items()}, lengths)


def signed_lengths(points: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Norm of the sum of sign x vector after each point, over the RMS norm of one vector.

    The vectors are those of the walk: their inner products are exp(key_scale <a, b>).
    points: [S,2]. signs: [draws,S]. Returns [draws,S].
    """
    centred = points - points.mean(axis=0)
    products = np.exp(PLANE.key_scale * centred @ centred.T)
    terms = signs[:, :, None] * signs[:, None] * products
    squares = np.diagonal(np.cumsum(np.cumsum(terms, axis=1), axis=2), axis1=1, axis2=2)
    return np.sqrt(np.maximum(squares, 0) / np.diag(products).mean())


def draw_halves(halves: Halves, caption: str) -> runtime.Picture:
    """Both halves in the plane, with kept and dropped keys per cluster, and the norms."""
    figure, (*planes, right) = pictures.begin(7.0, 3.2, columns=3)
    colours = [COMPRESSION[name]["color"] for name in ("uniform, weighted", "balance, walk")]
    for axes, colour, (name, signs) in zip(planes, colours, halves.signs.items(), strict=True):
        fill = np.where(signs > 0, colour, "white")
        axes.scatter(*halves.points.T, s=16, c=fill, edgecolors=colour, linewidths=0.7)
        for number, at in enumerate(0.55 * CENTRES):
            of_group = signs[halves.group == number]
            reported = f"{(of_group > 0).sum()}:{(of_group < 0).sum()}"
            axes.annotate(reported, at, ha="center", va="center", fontsize=8)
        axes.set_title(f"{name},\nkept : dropped", fontsize=9)
        axes.set(xlabel="key, 1st coordinate", ylabel="key, 2nd coordinate", aspect="equal",
                 xticks=[-2, 0, 2], yticks=[-2, 0, 2])  # fmt: skip
        lengths = halves.lengths[name]
        at = np.arange(1, lengths.shape[1] + 1)
        right.fill_between(at, *np.quantile(lengths, [0.1, 0.9], axis=0), color=colour, alpha=0.25)
        right.plot(at, np.median(lengths, axis=0), color=colour, label=name)
    right.set(xlabel="points with a sign", ylabel="norm of the signed sum", ylim=(0, None))
    right.legend(frameon=False, fontsize=8, loc="upper left")
    return runtime.picture(figure, caption, dpi=80, colours=32)


def compare(
    spec: Spec, q: np.ndarray, k: np.ndarray, v: np.ndarray, ends: tuple[int, int], rounds: int,
    seeds: Sequence[int], names: Sequence[str] = COMPARED,
) -> Errors:  # fmt: skip
    """Relative attention error of the last QUERIES after each method has compressed the rest.

    q, k, v: [T,*,H]. ends: how many of the first and last tokens stay; of those between, one in
    2^rounds stays. `snapkv` is deterministic, so it has one error.
    """
    exact = attend(spec, q, k, v, parse_policy("full"))
    between, errors = len(k) - QUERIES - sum(ends), {}
    for name in names:
        chosen = parse_policy(policy_string(name, rounds, between, *ends))
        draws = seeds[:1] if name == "snapkv" else seeds
        outputs = (attend(spec, q, k, v, chosen, seed) for seed in draws)
        errors[name] = [relative_error(output, exact) for output in outputs]
    return errors


def policy_string(name: str, rounds: int, between: int, sinks: int, window: int) -> str:
    """The policy string of a method that keeps both ends and one in 2^rounds tokens between."""
    if name == "snapkv":
        capacity = sinks + window + (between >> rounds)
        return f"snapkv:capacity={capacity},window={single_layer.WINDOW}"
    return f"{METHODS[name]},rounds={rounds},sinks={sinks},window={window}"


def attention_on_heaviest(
    spec: Spec, q: np.ndarray, k: np.ndarray, v: np.ndarray, between: slice, share: float
) -> float:
    """Share of the attention on some keys that their heaviest receive; mean over queries and heads.

    q, k, v: [T,*,H]. between: the keys. share: the fraction of them that counts as heaviest.
    """
    rows = CapturedLayer(*(jnp.asarray(a, jnp.float32)[None] for a in (q, k, v)))
    ordered = np.sort(attention_weights(spec, rows)[..., between], axis=-1)[..., ::-1]
    first = ordered[..., : max(1, round(share * ordered.shape[-1]))]
    return float((first.sum(axis=-1) / ordered.sum(axis=-1)).mean())


def measure_layers(
    spec: Spec,
    layers: Mapping[int, CapturedLayer],
    rounds: Sequence[int],
    seeds: int,
    names: Sequence[str] = ALL,
) -> dict[int, dict[str, Any]]:
    """The errors of each method on captured layers.

    Returns by layer: `errors` by T and method, [seeds] each, averaged over stretches of text;
    `tenth`, the share of the attention between the ends on its heaviest tenth of keys; and `sink`,
    the share of all attention on the first token.
    """
    by_layer: dict[int, dict[str, Any]] = {}
    for place, (layer, captured) in enumerate(layers.items()):
        per_stretch = []
        for number, seen in enumerate(zip(*map(np.asarray, captured), strict=True)):
            first = seeds * (place + len(layers) * number)  # no seed is used twice
            draws = range(first, first + seeds)
            errors = {t: compare(spec, *seen, (ENDS, ENDS), t, draws, names) for t in rounds}
            attention = partial(attend, spec, *seen, parse_policy("full"))
            alone = [relative_error(attention(between=False), attention())]
            between = slice(ENDS, len(seen[0]) - QUERIES - ENDS)
            per_stretch.append({
                "errors": {t: of_t | {"ends alone": alone} for t, of_t in errors.items()},
                "tenth": attention_on_heaviest(spec, *seen, between, 0.1),
            })  # fmt: skip
        means = jax.tree.map(lambda *all_of: float(np.mean(all_of)), *per_stretch)
        by_layer[layer] = means | {"sink": sink_weight(spec, captured)}
    return by_layer


def draw_errors(by_layer: Mapping[int, Mapping[str, Any]], caption: str) -> runtime.Picture:
    """Errors by the share of tokens kept, one panel per layer."""
    figure, panels = pictures.begin(7.4, 3.9, columns=len(by_layer))
    for axes, (layer, measured) in zip(panels, by_layer.items(), strict=True):
        names = next(iter(measured["errors"].values()))
        for place, name in enumerate(names):
            lines = {t: spread(errors[name]) for t, errors in measured["errors"].items()}
            # Offset, so that the ranges do not overlap.
            at = np.arange(len(lines)) + 0.05 * (place - (len(names) - 1) / 2)
            label = name if axes is panels[0] else None
            draw_spreads(
                axes, at, lines, label=label, marker="o", ms=3, lw=1.2, **COMPRESSION[name]
            )
        axes.set(xlabel="kept (%)", title=f"layer {layer}")
        axes.set_xticks(range(len(lines)), [f"{100 / 2**t:g}" for t in lines])
    for axes in panels:
        axes.set_ylim(0, max(panel.dataLim.y1 for panel in panels) * 1.05)
    panels[0].set_ylabel("relative error of attention")
    pictures.legend(figure, 4)
    return runtime.picture(figure, caption, dpi=80, colours=96)


def error_table(by_layer: Mapping[int, Mapping[str, Any]], rounds: int) -> str:
    """By layer: where attention goes, and the error of balanced pairs over each method's."""
    methods = next(iter(by_layer.values()))["errors"][rounds]
    baselines = [name for name in COMPARED[1:] if name in methods]
    lines = ["          attention on the      error of balance, pairs over that of"]
    lines.append("layer   1st   heaviest 10%" + "".join(f"   {name:>6}" for name in baselines))
    for layer, measured in by_layer.items():
        errors = {name: np.median(line) for name, line in measured["errors"][rounds].items()}
        ratios = (f"{errors[COMPARED[0]] / errors[n]:{3 + max(6, len(n))}.2f}" for n in baselines)
        lines.append(f"{layer:5}{measured['sink']:6.0%}{measured['tenth']:15.0%}" + "".join(ratios))
    return "\n".join(lines)


def synthetic_prompt(
    name: str, seed: int, sharp: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v [T,HEADS,DIM] of a prompt and of the queries after it; coordinates of unit variance.

    name: one of SYNTHETIC. sharp: standard deviation of a query's logits.
    """
    random = np.random.default_rng(seed)
    tokens = BETWEEN + WINDOW + QUERIES
    q, *noise = random.normal(size=(3, tokens, HEADS, DIM))
    q, (k, v) = sharp * q, noise
    if name == "neighbours alike":
        for i in range(1, tokens):
            k[i], v[i] = (0.95 * a[i - 1] + (1 - 0.95**2) ** 0.5 * a[i] for a in (k, v))
    elif name == "kinds, mixed":
        kind = random.integers(0, KINDS, tokens)
        of_kind = random.normal(size=(2, KINDS, HEADS, DIM))[:, kind]
        k, v = (0.96 * of_kind[i] + 0.28 * noise[i] for i in (0, 1))
    elif name == "a few heavy keys":  # all queries share a direction with these keys
        q = q + 1.0
        k[random.choice(BETWEEN, HEAVY, replace=False)] += LEAD / DIM**0.5
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def measure_synthetic(name: str, seeds: int, sharp: float = 1.0, rounds: int = 2) -> Errors:
    """The errors of each method, one synthetic prompt per seed; and `heaviest`, the share of the
    attention on the heaviest hundredth of the keys."""
    by_method: Errors = {method: [] for method in ("heaviest", *COMPARED)}
    for seed in range(seeds):
        prompt = synthetic_prompt(name, seed, sharp)
        by_method["heaviest"].append(attention_on_heaviest(SPEC, *prompt, slice(BETWEEN), 0.01))
        for method, errors in compare(SPEC, *prompt, (0, WINDOW), rounds, [seed]).items():
            by_method[method] += errors
    return by_method


def draw_synthetic(by_prompt: Mapping[str, Errors], caption: str) -> runtime.Picture:
    """Errors of each method on each kind of synthetic prompt, on a log scale."""
    figure, axes = pictures.begin(7.0, 3.8)
    for place, (name, mark) in enumerate(zip(COMPARED, "osD^v", strict=True)):
        at = np.arange(len(by_prompt)) + 0.14 * (place - (len(COMPARED) - 1) / 2)
        lines = {which: spread(errors[name]) for which, errors in by_prompt.items()}
        draw_spreads(axes, at, lines, fmt=mark, ms=5, label=name, color=COMPRESSION[name]["color"],
                     mfc="white" if name == "uniform" else None)  # fmt: skip
    axes.axhline(1, color=pictures.INK, lw=0.8, linestyle="dotted")
    axes.set(yscale="log", ylabel="relative error of attention")
    axes.set_xticks(range(len(by_prompt)), by_prompt)
    axes.set_yticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
    axes.set_yticks([], minor=True)
    pictures.legend(figure, 5)
    return runtime.picture(figure, caption)


def draw_by_concentration(measured: Sequence[Errors], caption: str) -> runtime.Picture:
    """Errors by concentration of attention."""
    figure, axes = pictures.begin(6.4, 3.4)
    at = [100 * np.mean(errors["heaviest"]) for errors in measured]
    for name in COMPARED:
        lines = {str(i): spread(errors[name]) for i, errors in enumerate(measured)}
        draw_spreads(axes, at, lines, label=name, marker="o", ms=3, **COMPRESSION[name])
    axes.set(xlabel="attention on the heaviest hundredth of the keys (%)", xlim=(0, None),
             ylabel="relative error of attention", ylim=(0, None))  # fmt: skip
    pictures.legend(figure, 5)
    return runtime.picture(figure, caption, dpi=80)


def measure_cost(llm: Llm, ids: Sequence[int], rounds: int = 2, count: int = 5) -> dict[str, float]:
    """Milliseconds of one prefill, and of compression in all layers, medians of `count`; and the
    percentage of the caches' bytes that is left."""

    def read() -> tuple[Any, ...]:
        stream = models.Stream(llm, f"uniform:rounds={rounds}", tokens=len(ids))
        stream.prefill([ids])
        return jax.block_until_ready(stream.decoding).states

    def compress(name: str) -> tuple[Any, ...]:
        chosen = parse_policy(policy_string(name, rounds, len(ids), sinks=32, window=32))
        caches = (finish_prefill_layer(chosen, llm.spec, llm.mesh, state) for state in states)
        return jax.block_until_ready(tuple(caches))

    states = read()  # the same for every method; compiles
    names = ("stratified", "uniform, weighted", "balance, pairs", "balance, walk")
    variants = {f"compress: {name} (ms)": timing.timed(partial(compress, name)) for name in names}
    costs = {"prefill (ms)": 1e3 * timing.timed(read)()}
    seconds = timing.time_rounds(variants, count, f"compressing {len(ids):,} tokens")
    size = lambda caches: sum(leaf.nbytes for leaf in jax.tree.leaves(caches))  # noqa: E731
    costs |= {name: 1e3 * float(np.median(times)) for name, times in seconds.items()}
    return costs | {"memory left (%)": 100 * size(compress("uniform, weighted")) / size(states)}
