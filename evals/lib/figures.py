"""Plots of evals/results/*.json, saved beside the records, and the tables of pages.

`python -m jaxkv.evals.lib.figures` draws and fills in everything again; an experiment draws its own
plots at its end. An experiment makes the table between <!--table NAME--> and <!--/table-->.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.benchmarks import kvpress_parity
from jaxkv.evals.lib import plots
from jaxkv.evals.lib.record import RESULTS, ROOT, make_parser, read, run_command
from jaxkv.models.tools import pictures

OUTSIDE = "outside right upper"
TABLE = re.compile(r"(<!--table (\w+)-->\n).*?(<!--/table-->)", re.DOTALL)


class RecordPlot(NamedTuple):
    """A plot of a record. draw: fills in the axes; its docstring is the caption.

    legend: its place. height: in inches. columns: panels side by side.
    """

    record: str
    draw: Callable[[Any, dict], None]
    title: str
    legend: str = OUTSIDE
    height: float = 3.5
    columns: int = 1


def main() -> None:
    make_parser("jaxkv.evals.lib.figures", __doc__).parse_args()
    for name in dict.fromkeys(picture.record for picture in FIGURES.values()):
        print("drew", *draw(name))
    for page_file in pages():
        page_file.write_text(fill(page_file.read_text("utf-8")), "utf-8")


def pages() -> list[Path]:
    """The pages with tables."""
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "evals").glob("*.md")]
    return [file for file in sorted(written) if TABLE.search(file.read_text("utf-8"))]


def fill(text: str) -> str:
    """The text with the current tables."""
    from jaxkv.evals.lib.experiments import TABLES  # an experiment that only draws needs no others

    if len(TABLE.findall(text)) != text.count("<!--table "):
        raise UserError("a table of a page must end with <!--/table-->, got one without; add it")
    return TABLE.sub(lambda mark: mark[1] + TABLES[mark[2]]() + mark[3], text)


def draw(name: str) -> list[str]:
    """Draw the plots of one record; return their names."""
    results, drawn = read(name)["results"], []
    for file, picture in FIGURES.items():
        if picture.record != name:
            continue
        figure, axes = pictures.begin(6.4, picture.height, picture.columns)
        picture.draw(axes, results)
        if picture.legend == OUTSIDE:
            figure.legend(frameon=False, fontsize=8, loc=OUTSIDE)
        elif picture.columns == 1 and axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc=picture.legend)
        caption = " ".join((picture.draw.__doc__ or "").split())
        png = pictures.finish(figure, caption, 110, picture.title)
        drawn.append(f"{file}.png")
        (RESULTS / drawn[-1]).write_bytes(png)
    return drawn


FIGURES = {
    "streaming_tables": RecordPlot("streaming_tables", plots.streaming_tables,
            "Sinks keep the loss level beyond the trained context", "upper left"),
    "backcopy": RecordPlot("backcopy", plots.backcopy,
                        "A trained sink must stay in the cache", "upper right"),
    "backcopy_curves": RecordPlot("backcopy", plots.backcopy_curves,
            "Only trained sink tokens attract attention in this task", "center right"),
    "rollouts": RecordPlot("rollouts", plots.rollouts,
            "A learner with the sampler's attention earns more reward", height=3.6, columns=2),
    "recall": RecordPlot("recall", plots.recall,
                      "Bounded caches: which facts are still known", height=3.8),
    "peers": RecordPlot("peers", kvpress_parity.plot, "jaxkv and kvpress give the same loss"),
    "prefix_report": RecordPlot("prefix_replay", plots.prefix_report,
                             "Blocks found in the prefix cache"),
    "prefix_snapshots": RecordPlot("prefix_replay", plots.prefix_snapshots,
                                "Where to store states of evicting caches"),
    "agents": RecordPlot("agents", plots.agents,
            "Evicting caches share prefixes in a fraction of the memory", "", 3.6, 2),
}  # fmt: skip


if __name__ == "__main__":
    run_command(main)
