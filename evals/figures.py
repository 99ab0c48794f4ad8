"""Pictures drawn from evals/results/*.json, each beside its record.

`python -m evals.figures` draws them all again; an experiment draws its own when it has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from evals.palette import COLOURS, OTHERS
from evals.record import RESULTS, read


def main() -> None:
    for name in sys.argv[1:] or FIGURES:
        print("drew", draw(name))


def draw(name: str) -> str:
    """The picture of one record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3), layout="constrained")
    FIGURES[name](axes, read(name)["results"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    # No software version or date inside: the same record gives the same bytes.
    figure.savefig(RESULTS / f"{name}.png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return f"{name}.png"


def endless(axes: Any, results: dict[str, Any]) -> None:
    """Loss by position in the long streams over that of the same tokens read afresh."""
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
    axes.set(xlabel="million tokens through one cache", ylabel="loss by block")
    axes.set_ylim(0, 1.1 * max(losses("fresh")))


def latency(axes: Any, results: dict[str, Any]) -> None:
    """The paper's Figure 10: time per token against the size of the cache."""
    table = results["recompute"]["table"]
    caches = [row["cache"] for row in table]
    for name, label in (("recompute", "re-computation"), ("streaming", "streaming")):
        times = [row["milliseconds"][name]["median"] for row in table]
        axes.plot(caches, times, "o-", color=COLOURS[name], label=label)
    for row in table:
        at = (row["cache"], row["milliseconds"]["recompute"]["median"])
        axes.annotate(f"{row['times_faster']['median']:.0f}x", at, (0, 5), ha="center",
                      fontsize=8, textcoords="offset points")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="ms per token")
    axes.set_xticks(caches, caches, minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(axes.get_ylim()[0] / 4, axes.get_ylim()[1] * 2)


FIGURES: dict[str, Callable[[Any, dict], None]] = {"endless": endless, "latency": latency}


if __name__ == "__main__":
    main()
