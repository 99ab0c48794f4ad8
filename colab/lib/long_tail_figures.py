"""The pictures of the notebook on MagicPIG: what colab/lib/long_tail.py computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.colab import long_tail, runtime
from jaxkv.colab.long_tail import FIFTH, Heads, Read, World
from jaxkv.contract import Spec
from jaxkv.evals.magicpig import inclusion
from jaxkv.evals.magicpig.heads import Layer
from jaxkv.models import pictures
from jaxkv.models.palette import COLOURS, LINES

MARKS = {"topk": "s", "oracle": "o", "uniform": "D"}


def draw_tails(found: Mapping[int, np.ndarray]) -> runtime.Picture:
    """The weight of the heaviest keys, a line for each query head [N,S] of each layer."""
    figure, axes = pictures.begin(6.0, 3.4)
    for sums in found.values():
        at = 100 * (np.arange(sums.shape[1]) + 1) / sums.shape[1]
        axes.plot(at, 100 * sums.T, color=COLOURS["full"], lw=0.9)
    axes.plot([100 * FIFTH] * 2, [0, 100], color=pictures.INK, lw=0.8, ls="--")
    axes.plot([0, 100], [0, 100], color=pictures.INK, lw=0.8, ls=":")
    axes.set(xlabel="heaviest keys (%)", ylabel="their weight (%)", xlim=(0, 100), ylim=(0, 100))
    caption = "dashed: a fifth of the keys; dotted: where lines lie if all keys count alike"
    which = ", ".join(map(str, found))
    reported = f"a line for each query head of layers {which}; {caption}"
    return runtime.picture(figure, reported, dpi=80)


def draw_when(
    found: Heads, worlds: Mapping[str, World], share: float, caption: str
) -> runtime.Picture:
    """Errors over top-k's by how much of the weight a fifth of the keys has: heads of a model
    beside drawn attention, a line a world."""
    figure, panels = pictures.begin(7.0, 4.0, columns=2)
    left, right = panels
    for kind in ("uniform", "oracle"):
        left.plot(100 * found.fifth, found.error[kind] / found.error["topk"], MARKS[kind], ms=3.5,
                  color=COLOURS[kind])  # fmt: skip
    for line, world in zip(LINES, worlds.values(), strict=False):
        for kind in world.error.keys() - {"topk"}:
            over = world.error[kind] / world.error["topk"]
            right.plot(100 * world.fifth, over, linestyle=line, lw=1.3, color=COLOURS[kind])
    for kind in ("oracle", "uniform", "magicpig"):
        right.plot([], [], color=COLOURS[kind], marker=MARKS.get(kind), ms=3.5, label=kind)
    for line, name in zip(LINES, worlds, strict=False):
        right.plot([], [], linestyle=line, color=pictures.INK, label=name)
    lowest, highest = (f(getattr(axes.dataLim, end) for axes in panels)
                       for f, end in ((min, "y0"), (max, "y1")))  # fmt: skip
    for axes, title in ((left, "heads of the model"), (right, "drawn keys")):
        axes.axhline(1, color=COLOURS["topk"], lw=1.2, label="topk" if axes is left else None)
        axes.set(xlabel="weight of the heaviest fifth (%)", title=title, xlim=(15, 102),
                 yscale="log", ylim=(lowest / 1.2, 1.2 * highest))  # fmt: skip
        say_log(axes)
    left.set_ylabel(f"error over top-k's, {share:.0%} of the keys")
    pictures.legend(figure, 4)
    return runtime.picture(figure, caption, colours=128, dpi=80)  # many hues, each with its shades


def draw_budgets(
    found: Mapping[str, Mapping[str, Sequence[Read]]], wanted: Sequence[float]
) -> runtime.Picture:
    """The error by budget; a panel for each head."""
    figure, panels = pictures.begin(7.0, 3.4, columns=len(found))
    at = 100 * np.array(wanted)
    for axes, (name, kinds) in zip(np.ravel(panels), found.items(), strict=True):
        for kind, line in kinds.items():
            label = kind if axes is np.ravel(panels)[0] else None
            axes.plot(at, [one.error for one in line], marker=MARKS[kind], ms=3.5,
                      color=COLOURS[kind], label=label)  # fmt: skip
        axes.set(xlabel="budget (% of the keys)", xscale="log", yscale="log")
        axes.set_title(name, fontsize=9)
        say_log(axes)
        axes.set_xticks(at, [f"{x:g}" for x in at], fontsize=8)
        axes.set_xticks([], minor=True)
    np.ravel(panels)[0].set(ylabel="error over exact attention's length")
    pictures.legend(figure, 3)
    return runtime.picture(figure, "draws with replacement count each time; scales differ", dpi=80)


def say_log(axes: Any) -> None:
    """Plain numbers along a vertical scale of logarithms."""
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")


def draw_chances(spec: Spec, layer: Layer, pairs: Sequence[tuple[int, int]]) -> runtime.Picture:
    """Where keys lie, and the chance that tables find them there."""
    figure, axes = pictures.begin(7.0, 3.4)
    edges = np.linspace(-1, 1, 81)
    for center, label in ((False, "as they are"), (True, "less their mean")):
        counts = np.histogram(long_tail.cosines(spec, layer, center), edges)[0]
        look = {"color": COLOURS["magicpig"], "alpha": 0.3} if center else {"color": pictures.INK}
        axes.stairs(counts / counts.max(), edges, fill=center, label=f"keys, {label}", **look)
    at = np.linspace(-0.999, 0.999, 200)
    for (bits, count), line in zip(pairs, ("-", "--", ":", "-."), strict=False):
        chance = np.exp(inclusion.log_u(at, bits, count))
        axes.plot(at, chance, color=COLOURS["magicpig"], ls=line,
                  label=f"found, K={bits}, L={count}")  # fmt: skip
    axes.set(xlabel="cosine of a query with a key", ylabel="chance to be found", ylim=(0, 1.02))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return runtime.picture(figure, "the height of the ground: how many keys lie there", dpi=80)
