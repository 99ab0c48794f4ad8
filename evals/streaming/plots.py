"""Plots of StreamingLLM's records."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COLOURS, OTHERS


def endless(axes: Any, results: dict[str, Any]) -> None:
    """Loss of blocks of a long text: one cache from position 0, one cache across position 2^32, and
    a new cache per block. The three lines coincide."""
    at = [block["tokens"] / 1e6 for block in results["endless"]]

    def losses(stream: str) -> list[float]:
        return [block["loss"] for block in results[stream]]

    shown = (
        ("fresh", "each block from position 0", {"color": COLOURS["full"], "lw": 4}),
        ("endless", "one cache from position 0 on", {"color": COLOURS["streaming"], "lw": 1.5}),
        ("wrapped", "across position 2^32", {"color": OTHERS[1], "lw": 1.5, "ls": ":"}),
    )
    for stream, label, style in shown:
        axes.plot(at, losses(stream), label=label, **style)
    axes.set(xlabel="million tokens through one cache", ylabel="loss (nats per token)")
    axes.set_ylim(0, 1.1 * max(losses("fresh")))


def tables(axes: Any, results: dict[str, Any]) -> None:
    """Loss by position, mean over novels. Re-computation predicts few tokens: its line is that of 4
    sinks + 252 plus the mean difference at these tokens."""
    at = results["curve"]["tokens"]
    for name, (label, style) in SINK_LINES.items():
        axes.plot(at, results["curve"][name], label=label, **{"lw": 1.2} | style)
    pictures.mark(axes, results["context"], "trained context")
    axes.set(xlabel="position (tokens)", ylabel="loss (nats per token)", xlim=(0, at[-1]))


SINK_LINES = {
    "full": ("full attention", {"color": COLOURS["full"]}),
    "0+256": ("window of 256, no sink", {"color": COLOURS["window"]}),
    "4+252": ("4 sinks + 252", {"color": COLOURS["streaming"], "lw": 4, "alpha": 0.5}),
    "re-computation": ("re-computation of 256", {"color": COLOURS["recompute"]}),
}


def attention_maps(axes: Any, results: dict[str, Any]) -> None:
    """Attention of 16 queries (down) to 16 keys (across), mean over heads and stretches of text
    (StreamingLLM, Figure 2)."""
    maps = {layer: np.array(seen) for layer, seen in results["maps"].items()}
    size = len(next(iter(maps.values())))
    gap = np.full((size, 1), np.nan)
    hidden = np.triu(np.ones((size, size), bool), 1)
    shown = [np.hstack([np.where(hidden, np.nan, seen), gap]) for seen in maps.values()]
    picture = axes.imshow(np.hstack(shown), vmin=0, vmax=1, cmap="viridis")
    middles = [(size + 1) * number + size / 2 for number in range(len(maps))]
    axes.set_xticks(middles, [f"layer {layer}" for layer in maps], fontsize=8)
    axes.set_yticks([])
    axes.set_ylabel("queries", fontsize=8)
    axes.grid(visible=False)
    axes.figure.colorbar(picture, ax=axes, shrink=0.5, label="attention")


def first_token(axes: Any, results: dict[str, Any]) -> None:
    """Mean attention on the first token, of queries beyond the first 64 of 512 tokens, by layer.
    Dots: heads. Dotted: attention spread evenly."""
    heads = np.array(results["first_token"]["by_head"])
    layers = np.arange(len(heads))
    for head in heads.T:
        axes.plot(layers, head, ".", color=COLOURS["balance-stream"], markersize=4)
    axes.plot(layers, heads.mean(1), "-", color=COLOURS["streaming"], label="mean over heads")
    axes.axhline(results["even_attention"], color=COLOURS["full"], ls="dotted", label="even")
    axes.set(xlabel="layer", ylabel="share of attention on first token", ylim=(0, 1))
