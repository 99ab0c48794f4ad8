"""The plots of the notebook on MagicPIG, from the results of colab/lib/long_tail.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from jaxkv.colab import long_tail, runtime
from jaxkv.colab.long_tail import FIFTH, Heads, Measured, Synthetic
from jaxkv.contract import Spec
from jaxkv.evals.magicpig import inclusion
from jaxkv.evals.magicpig.heads import CapturedLayer
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COLOURS, LINES, OTHERS

MARKS = {"topk": "s", "oracle": "o", "uniform": "D"}


def draw_tails(tails: Mapping[int, np.ndarray]) -> runtime.Picture:
    """The cumulative weight of the heaviest keys, one line per query head [N,S] of each layer."""
    figure, axes = pictures.begin(6.0, 3.4)
    for (number, sums), colour in zip(tails.items(), cycle(OTHERS), strict=False):
        at = 100 * (np.arange(sums.shape[1]) + 1) / sums.shape[1]
        first, *_ = axes.plot(at, 100 * sums.T, color=colour, lw=0.9)
        first.set_label(f"layer {number}")
    axes.plot([100 * FIFTH] * 2, [0, 100], color=pictures.INK, lw=0.8, ls="--")
    axes.plot([0, 100], [0, 100], color=pictures.INK, lw=0.8, ls=":")
    axes.set(xlabel="heaviest keys (%)", ylabel="their weight (%)", xlim=(0, 100), ylim=(0, 100))
    caption = "dashed: a fifth of the keys; dotted: all keys with equal weight"
    pictures.legend(figure, len(tails))
    return runtime.picture(figure, f"one line per query head; {caption}", dpi=80, colours=32)


def draw_error_ratio(
    measured: Heads, worlds: Mapping[str, Synthetic], share: float, caption: str
) -> runtime.Picture:
    """Errors over top-k's by the weight of the heaviest fifth of the keys: heads of a model, and
    synthetic attention with one line per setting."""
    figure, panels = pictures.begin(7.0, 4.0, columns=2)
    model_axes, synthetic_axes = panels
    for kind in ("uniform", "oracle"):
        over = measured.error[kind] / measured.error["topk"]
        model_axes.plot(100 * measured.fifth, over, MARKS[kind], ms=3.5, color=COLOURS[kind])
    for line, world in zip(LINES, worlds.values(), strict=False):
        for kind in world.error.keys() - {"topk"}:
            over = world.error[kind] / world.error["topk"]
            synthetic_axes.plot(
                100 * world.fifth, over, linestyle=line, lw=1.3, color=COLOURS[kind]
            )
    for kind in ("oracle", "uniform", "magicpig"):
        synthetic_axes.plot([], [], color=COLOURS[kind], marker=MARKS.get(kind), ms=3.5, label=kind)
    for line, name in zip(LINES, worlds, strict=False):
        synthetic_axes.plot([], [], linestyle=line, color=pictures.INK, label=name)
    lowest, highest = (f(getattr(axes.dataLim, end) for axes in panels)
                       for f, end in ((min, "y0"), (max, "y1")))  # fmt: skip
    for axes, title in ((model_axes, "heads of the model"), (synthetic_axes, "synthetic keys")):
        axes.axhline(1, color=COLOURS["topk"], lw=1.2, label="topk" if axes is model_axes else None)
        axes.set(xlabel="weight of the heaviest fifth (%)", title=title, xlim=(15, 102),
                 yscale="log", ylim=(lowest / 1.2, 1.2 * highest))  # fmt: skip
        format_log_axis(axes)
    model_axes.set_ylabel(f"error over top-k's, {share:.0%} of the keys")
    pictures.legend(figure, 4)
    return runtime.picture(figure, caption, colours=96, dpi=80)


def draw_budgets(
    by_head: Mapping[str, Mapping[str, Sequence[Measured]]], budgets: Sequence[float]
) -> runtime.Picture:
    """The error by budget, one panel per head."""
    figure, panels = pictures.begin(7.0, 3.4, columns=len(by_head))
    at = 100 * np.array(budgets)
    for axes, (name, kinds) in zip(np.ravel(panels), by_head.items(), strict=True):
        for kind, line in kinds.items():
            label = kind if axes is np.ravel(panels)[0] else None
            axes.plot(at, [point.error for point in line], marker=MARKS[kind], ms=3.5,
                      color=COLOURS[kind], label=label)  # fmt: skip
        axes.set(xlabel="budget (% of the keys)", xscale="log", yscale="log")
        axes.set_title(name, fontsize=9)
        format_log_axis(axes)
        axes.set_xticks(at, [f"{x:g}" for x in at], fontsize=8)
        axes.set_xticks([], minor=True)
    np.ravel(panels)[0].set(ylabel="relative error of attention")
    pictures.legend(figure, 3)
    caption = "each draw with replacement counts; scales differ"
    return runtime.picture(figure, caption, dpi=80, colours=32)


def format_log_axis(axes: Any) -> None:
    """Label a logarithmic y axis with plain numbers, on a short one also those between."""
    low, high = axes.get_ylim()
    between = "25" if high < 100 * low else ""
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in between else "")


def draw_inclusion(
    spec: Spec, layer: CapturedLayer, pairs: Sequence[tuple[int, int]]
) -> runtime.Picture:
    """The distribution of keys by cosine, and the probability that hash tables find them."""
    figure, axes = pictures.begin(7.0, 3.4)
    edges = np.linspace(-1, 1, 81)
    for center, label in ((False, "uncentred"), (True, "centred")):
        counts = np.histogram(long_tail.cosines(spec, layer, center), edges)[0]
        look = {"color": COLOURS["magicpig"], "alpha": 0.3} if center else {"color": pictures.INK}
        axes.stairs(counts / counts.max(), edges, fill=center, label=f"{label} keys", **look)
    at = np.linspace(-0.999, 0.999, 200)
    for (bits, count), line in zip(pairs, ("-", "--", ":", "-."), strict=False):
        chance = np.exp(inclusion.log_u(at, bits, count))
        axes.plot(at, chance, color=COLOURS["magicpig"], ls=line,
                  label=f"found, K={bits}, L={count}")  # fmt: skip
    axes.set(xlabel="cosine of query and key", ylabel="inclusion probability", ylim=(0, 1.02))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    caption = "shaded area and outline: number of keys, scaled to 1"
    return runtime.picture(figure, caption, dpi=80, colours=32)
