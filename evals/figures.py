"""Pictures drawn from evals/results/*.json, each beside its record.

`python -m evals.figures` draws them all again; an experiment draws its own when it has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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

    axes.plot(at, losses("fresh"), color=GREY, lw=4, label="each block from position 0")
    axes.plot(at, losses("endless"), color="C0", lw=1.5, label="one cache, position 0 to the end")
    axes.plot(at, losses("wrapped"), color="C1", lw=1.5, ls=":", label="across position 2^32")
    axes.set(xlabel="million tokens through one cache", ylabel="loss by block")
    axes.set_ylim(0, 1.1 * max(losses("fresh")))


GREY = "0.75"
FIGURES: dict[str, Callable[[Any, dict], None]] = {"endless": endless}


if __name__ == "__main__":
    main()
