"""Reading a part of the keys of a real model: a sample by weight, the largest, or any.

What the notebook on MagicPIG (arXiv 2410.16179) computes and draws; the same at full size is in
evals/sampling.py, tune_lsh.py and sparse.py, from which the parts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from evals import heads, inclusion, runtime, shares, sparse
from evals.heads import Layer
from evals.palette import COLOURS
from evals.sparse import Text
from jaxkv.contract import Policy, Spec
from jaxkv.policies import MagicPIG, Oracle, TopK, VAttention
from jaxkv.typing import Float32
from models.llm import Llm

SINKS, WINDOW = 4, 64
SINK = 1  # first tokens that count as the sink
KINDS = ("topk", "oracle", "uniform")
PAIRS = ((10, 150), (8, 75), (6, 40), (4, 20))  # K and L, from the paper's on


class Read(NamedTuple):
    """One way to read a part. share: of the keys; error: over exact attention's length."""

    share: float
    error: float


def tails(spec: Spec, layer: Layer) -> Float32[np.ndarray, "N S"]:
    """By query head the weight of the 1, 2, ... heaviest keys, in the mean over queries."""
    asked = heads.ask(spec, layer, 0, 1)
    logits = np.where(asked.between | asked.exact, np.asarray(asked.logits, np.float64), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    _, kv_heads, group, _, size = weights.shape
    sums = np.cumsum(-np.sort(-weights, axis=-1), axis=-1).mean(axis=(0, 3))
    return sums.reshape(kv_heads * group, size).astype(np.float32)


def sink(spec: Spec, layer: Layer) -> float:
    """The weight of the first token, in the mean over heads and queries."""
    asked = heads.ask(spec, layer, 0, 1)
    logits = np.where(asked.between | asked.exact, np.asarray(asked.logits, np.float64), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return float((weights[..., :SINK].sum(-1) / weights.sum(-1)).mean())


def chosen(kind: str, share: float) -> Policy:
    """A way to read a share of all keys but the query's own."""
    ends = {"sinks": 0, "window": 1}
    evenly = {"epsilon": 0.99, "delta": 0.99, "sides": "one"}  # no more than it was told to
    make = {
        "topk": lambda: TopK(share, **ends),
        "oracle": lambda: Oracle(share, **ends),
        "uniform": lambda: VAttention(0.0, share, **evenly, **ends),
    }
    return make[kind]()


def budgets(spec: Spec, layer: Layer, wanted: Sequence[float], seeds: int) -> dict[str, list[Read]]:
    """The error of a layer's attention by the share of the keys, for each of KINDS."""
    exact = heads.exactly(spec, layer, "by budget")
    return {
        kind: [measure(chosen(kind, share), spec, layer, exact, seeds) for share in wanted]
        for kind in KINDS
    }


def measure(policy: Policy, spec: Spec, layer: Layer, exact: jax.Array, seeds: int) -> Read:
    """Means over stretches, heads and seeds."""
    met = [heads.meet(policy, spec, layer, seed) for seed in range(seeds)]
    error = np.mean([heads.errors(one.out, exact) for one in met])
    return Read(float(np.mean([one.share for one in met])), float(error))


def cosines(spec: Spec, layer: Layer, center: bool) -> np.ndarray:
    """Of queries with the keys between both ends, as they are or less their mean."""
    if center:
        _, found = heads.centred(spec, layer, SINKS, WINDOW)
    else:
        q, k = (np.asarray(x, np.float64) for x in heads.turned(spec, layer))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1])
        found = np.einsum("bqkgh,bkth->bkgqt", q, k)
    between = np.broadcast_to(heads.ask(spec, layer, SINKS, WINDOW).between, found.shape)
    return np.asarray(found)[between].clip(-1, 1)


def tables(
    spec: Spec, layers: Mapping[int, Layer], pairs: Sequence[tuple[int, int]], seeds: int
) -> dict[tuple[int, int, bool], Read]:
    """What hash tables read and what that leaves wrong, by K, L and whether keys are centred."""
    exact = {n: heads.exactly(spec, layer, "by tables") for n, layer in layers.items()}
    found = {}
    for bits, count in pairs:
        for center in (True, False):
            policy = MagicPIG(bits, count, SINKS, WINDOW, center=center, zone=shares.ROOM)
            each = [measure(policy, spec, x, exact[n], seeds) for n, x in layers.items()]
            found[bits, count, center] = Read(*np.mean(each, axis=0).tolist())
    return found


def told(found: Mapping[tuple[int, int, bool], Read], keys: int) -> str:
    """The same as a table; keys: that are hashed, of which each table has two bytes."""
    lines = [f"{'K':>3}{'L':>5}{'read':>9}{'error':>8}{'not centred: read':>20}{'error':>8}"
             f"{'tables, bytes a key':>22}"]  # fmt: skip
    for bits, count, center in found:
        if center:
            own, bare = (found[bits, count, each] for each in (True, False))
            lines.append(f"{bits:3}{count:5}{own.share:9.1%}{own.error:8.3f}{bare.share:20.1%}"
                         f"{bare.error:8.3f}{2 * count:22}")  # fmt: skip
    return "\n".join(lines)


def losses(
    llm: Llm, ids: Sequence[int], policies: Mapping[str, str], stretches: int
) -> dict[str, dict[str, Any]]:
    """By how much the loss behind prompts is over full attention's, with two standard errors."""
    size, front = llm.config.context, llm.tokenizer.front
    cuts = [[*front, *ids[at : at + size - len(front)]] for at in range(1, len(ids) - size, size)]
    text = Text(llm, [], cuts[:stretches], [])
    base = sparse.losses(text, "full", 1, "full")
    return {
        name: sparse.over(sparse.losses(text, policy, 2, name), base)
        for name, policy in policies.items()
    }


def draw_tails(found: Mapping[int, np.ndarray]) -> runtime.Picture:
    """The weight of the heaviest keys, a line for each head; a panel for each layer."""
    figure, all_axes = runtime.axes(7.5, 3.2, columns=len(found))
    for axes, (number, sums) in zip(np.ravel(all_axes), found.items(), strict=True):
        at = 100 * (np.arange(sums.shape[1]) + 1) / sums.shape[1]
        for line in sums:
            axes.plot(at, 100 * line, color=COLOURS["full"], lw=1.2)
        axes.plot([20, 20], [0, 100], color="#404040", lw=0.8, ls="--")
        axes.set(xlabel="heaviest keys (%)", title=f"layer {number}", ylim=(0, 100), xlim=(0, 100))
    np.ravel(all_axes)[0].set(ylabel="their weight (%)")
    return runtime.picture(figure, "a line for each query head; dashed: a fifth of the keys")


def draw_budgets(
    found: Mapping[int, Mapping[str, Sequence[Read]]], wanted: Sequence[float]
) -> runtime.Picture:
    """The error by budget; a panel for each layer."""
    figure, all_axes = runtime.axes(7.5, 3.2, columns=len(found))
    at = 100 * np.array(wanted)
    for axes, (number, kinds) in zip(np.ravel(all_axes), found.items(), strict=True):
        for kind, line in kinds.items():
            axes.plot(at, [one.error for one in line], "o-", ms=3, color=COLOURS[kind], label=kind)
        axes.set(xlabel="budget (% of the keys)", title=f"layer {number}", xscale="log",
                 yscale="log")  # fmt: skip
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
        axes.set_xticks(at, [f"{x:g}" for x in at], fontsize=7)
        axes.set_xticks([], minor=True)
    np.ravel(all_axes)[0].set(ylabel="error over exact attention")
    handles, labels = np.ravel(all_axes)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=8, ncols=3)
    return runtime.picture(figure, "keys drawn with replacement count each time they are drawn")


def draw_chances(spec: Spec, layer: Layer, pairs: Sequence[tuple[int, int]]) -> runtime.Picture:
    """Where keys lie, and the chance that tables find them there."""
    figure, axes = runtime.axes(7.0, 3.4)
    edges = np.linspace(-1, 1, 81)
    for center, label in ((False, "as they are"), (True, "less their mean")):
        counts = np.histogram(cosines(spec, layer, center), edges)[0]
        colour = COLOURS["topk"] if center else COLOURS["full"]
        axes.stairs(counts / counts.max(), edges, fill=True, alpha=0.35, color=colour,
                    label=f"keys, {label}")  # fmt: skip
    at = np.linspace(-0.999, 0.999, 200)
    for (bits, count), line in zip(pairs, ("-", "--", ":", "-."), strict=False):
        chance = np.exp(inclusion.log_u(at, bits, count))
        axes.plot(at, chance, color=COLOURS["magicpig"], ls=line, label=f"found, {bits=}, {count=}"
                  .replace("bits", "K").replace("count", "L"))  # fmt: skip
    axes.set(xlabel="cosine of a query with a key", ylabel="chance to be found", ylim=(0, 1.02))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return runtime.picture(figure, "the height of the ground: how many keys lie there")
