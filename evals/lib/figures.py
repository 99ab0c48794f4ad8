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
    legend: str = "lower left"
    height: float = 3.5
    columns: int = 1


class FinishedPlot(NamedTuple):
    """A plot of a record that no present command makes, so its picture stays as it is."""

    record: str
    caption: str
    title: str


def main() -> None:
    make_parser("jaxkv.evals.lib.figures", __doc__).parse_args()
    for name in dict.fromkeys(picture.record for picture in FIGURES.values()):
        if (RESULTS / f"{name}.json").exists():
            print("drew", *draw(name))
    for page_file in pages():
        page_file.write_text(fill(page_file.read_text("utf-8")), "utf-8")


def pages() -> list[Path]:
    """The pages with tables."""
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "evals").glob("*.md")]
    return [file for file in sorted(written) if TABLE.search(file.read_text("utf-8"))]


def fill(text: str) -> str:
    """The text with the current tables."""
    from jaxkv.evals.lib.experiments import TABLES  # which import this module

    if len(TABLE.findall(text)) != text.count("<!--table "):
        raise UserError("a table of a page must end with <!--/table-->, got one without; add it")
    return TABLE.sub(lambda mark: mark[1] + TABLES[mark[2]]() + mark[3], text)


def draw(name: str) -> list[str]:
    """Draw the plots of one record; return their names."""
    results, drawn = read(name)["results"], []
    for file, picture in FIGURES.items():
        if picture.record != name or isinstance(picture, FinishedPlot):
            continue
        figure, axes = pictures.begin(6.4, picture.height, picture.columns)
        picture.draw(axes, results)
        if picture.legend == OUTSIDE:
            figure.legend(frameon=False, fontsize=8, loc=OUTSIDE)
        elif picture.columns == 1 and axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc=picture.legend)
        png = pictures.finish(figure, caption_of(picture), 110, picture.title)
        drawn.append(f"{file}.png")
        (RESULTS / drawn[-1]).write_bytes(png)
    return drawn


def caption_of(picture: RecordPlot | FinishedPlot) -> str:
    """The caption of a plot; of one that is drawn, the docstring of its function.

    Raises ValueError if it has none.
    """
    if isinstance(picture, FinishedPlot):
        return picture.caption
    if not picture.draw.__doc__:
        raise ValueError(f"{picture.draw.__name__} must say in its docstring what it draws")
    return " ".join(picture.draw.__doc__.split())


CHAPTERS: dict[str, dict[str, RecordPlot | FinishedPlot]] = {
    "Attention sinks": {
        "streaming_tables": RecordPlot("streaming_tables", plots.streaming_tables,
                "Sinks keep the loss level beyond the trained context", "upper left"),
        "first_token": RecordPlot("attention_maps", plots.first_token,
                "In later layers the first token gets much of the attention", "upper left"),
        "attention_maps": RecordPlot("attention_maps", plots.attention_maps,
                                  "Attention of the first tokens, by layer", height=2.4),
        "endless_135m": RecordPlot("endless_135m", plots.endless,
                                "One cache for a whole text costs no loss (SmolLM2-135M)"),
        "endless": RecordPlot("endless", plots.endless,
                           "One cache for a whole text costs no loss (small model)"),
        "latency": RecordPlot("latency", plots.latency,
                           "Streaming decodes in constant time; re-computation does not"),
    },
    "Trained sinks": {
        "sinks_in_front": RecordPlot("sinks_in_front", plots.sinks_in_front,
                                  "One sink is enough for SmolLM2, whichever it is", OUTSIDE),
        "emergence": FinishedPlot("emergence",
                "The largest attention on the first token of any head, during training from random "
                "weights. In SmolLM2-135M, half of the heads give it more than 0.3.",
                "Small models grow no attention sink"),
        "sink_tables": RecordPlot("sink_tables", plots.sink_tables,
                               "Loss in training, by sink variant", "upper right"),
        "backcopy": RecordPlot("backcopy", plots.backcopy,
                            "A trained sink must stay in the cache", "upper right"),
        "backcopy_curves": RecordPlot("backcopy", plots.backcopy_curves,
                "Only trained sink tokens attract attention in this task", "center right"),
    },
    "Reinforcement learning": {
        "rollouts": RecordPlot("rollouts", plots.rollouts,
                            "A learner with the sampler's attention earns more reward", OUTSIDE,
                            3.6, 2),
    },
    "Samples of evicted tokens": {
        "recall": RecordPlot("recall", plots.recall,
                          "Bounded caches: which facts are still known", OUTSIDE, height=3.8),
    },
    "Prompt compression": {
        "peers": RecordPlot("peers", kvpress_parity.plot,
                            "jaxkv and kvpress give the same loss", OUTSIDE),
        "single_layer_135m": RecordPlot("single_layer_135m", plots.single_layer,
                                     "Error of one compressed layer (SmolLM2-135M)", OUTSIDE),
        "single_layer": RecordPlot("single_layer", plots.single_layer,
                                "Error of one compressed layer (small model)", OUTSIDE),
    },
    "Sparse attention": {
        "sampling_budgets": RecordPlot("sampling", plots.sampling_budgets,
                                    "Where sampling beats top-k: spread-out attention", OUTSIDE),
        "tune_lsh": RecordPlot("tune_lsh", plots.tune_lsh,
                            "Error of every K and L of the LSH index"),
    },
    "Prefix caching": {
        "prefix_report": RecordPlot("prefix_replay", plots.prefix_report,
                                 "Blocks found in the prefix cache", OUTSIDE),
        "prefix_items": RecordPlot("prefix_engine", plots.prefix_items,
                                "Throughput with and without the prefix cache", "lower left"),
        "prefix_snapshots": RecordPlot("prefix_replay", plots.prefix_snapshots,
                                    "Where to store states of evicting caches", OUTSIDE),
        "agents": RecordPlot("agents", plots.agents,
                "Evicting caches share prefixes in a fraction of the memory", "", 3.6, 2),
    },
}  # fmt: skip
FIGURES = {name: picture for chapter in CHAPTERS.values() for name, picture in chapter.items()}


def page() -> str:
    """All pictures with title and caption, as Markdown."""
    lines = []
    for chapter, pictures_of_chapter in CHAPTERS.items():
        lines += ["", f"## {chapter}"]
        for name, picture in pictures_of_chapter.items():
            record, title = picture.record, picture.title
            if not (RESULTS / f"{record}.json").exists():  # it needs an accelerator
                continue
            lines += [
                f"\n### {title}\n",
                f"![{title}](../evals/results/{name}.png)\n",
                f"{caption_of(picture)} ([record](../evals/results/{record}.json))",
            ]
            maps = sorted(RESULTS.glob(f"{name}_*-*.png")) if name == "sink_tables" else ()
            lines += [f"\n![Attention of {m.stem}](../evals/results/{m.name})" for m in maps]
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    run_command(main)
