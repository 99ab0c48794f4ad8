"""Plots of evals/results/*.json, saved beside the records, and the tables of pages.

`python -m jaxkv.evals.lib.figures` draws and fills in everything again; an experiment draws its own
plots at its end. An experiment makes the table between <!--table NAME--> and <!--/table-->.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.evals.benchmarks import kvpress_parity
from jaxkv.evals.lib.record import RESULTS, ROOT, make_parser, read, run_command
from jaxkv.evals.prefix_caching import plots
from jaxkv.evals.reservoir import plots as reservoir_plots
from jaxkv.evals.streaming import plots as streaming_plots
from jaxkv.evals.training import plots as training_plots
from jaxkv.evals.training.sink_tables import variant_of_record
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COLOURS, COMPRESSION, LINES, OTHERS, VARIANTS, styles

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


def latency(axes: Any, results: dict[str, Any]) -> None:
    """Time per token by cache size, and the ratio of re-computation to streaming (StreamingLLM,
    Figure 10)."""
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


def sink_tables(axes: Any, results: dict[str, Any]) -> None:
    """Loss of every variant during training (StreamingLLM, Figure 6)."""
    for variant in results["variants"].values():
        steps, losses = zip(*(look[:2] for look in variant["curve"]), strict=True)
        million = variant["tokens"] / variant["recipe"]["steps"] / 1e6
        sinks = variant_of_record(variant)
        axes.plot([million * step for step in steps], losses, color=VARIANTS[sinks], label=sinks)
    axes.set(xlabel="million tokens of training", ylabel="validation loss (nats per token)")


def draw_spreads(axes: Any, at: Any, lines: dict[str, Any], **style: Any) -> None:
    """Medians over the seeds, with minimum and maximum."""
    mid = np.array([line["median"] for line in lines.values()])
    ends = [[line[end] for line in lines.values()] for end in ("min", "max")]
    axes.errorbar(at, mid, np.abs(ends - mid), capsize=2, **style)


def backcopy(axes: Any, results: dict[str, Any]) -> None:
    """Loss over a cache with the first four tokens; median, minimum and maximum of seeds. Only
    models with a trained sink lose when it is evicted. In the band the loss is the same to
    rounding (StreamingLLM, Table 3, at small scale)."""
    rounding = 1e-4  # nats; rounding gives 1e-5
    for number, (variant, variant_results) in enumerate(results["variants"].items()):
        over = variant_results["summary"]["loss_over_base"]
        at = np.arange(len(over)) + 0.15 * (number - (len(results["variants"]) - 1) / 2)
        draw_spreads(axes, at, over, fmt="o", markersize=5, color=VARIANTS[variant], label=variant)
    axes.axhspan(-rounding, rounding, color=COLOURS["full"], alpha=0.2, lw=0)
    for boundary in range(1, len(over)):
        axes.axvline(boundary - 0.5, color=COLOURS["full"], lw=0.4)
    axes.set_yscale("symlog", linthresh=rounding, linscale=0.5)
    axes.set_yticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
    axes.set_xticks(range(len(over)), over)
    axes.set(xlabel="first + newest tokens in the cache", ylabel="loss over 4+20 (nats per token)",
             xlim=(-0.5, len(over) - 0.5), ylim=(-2 * rounding, 4))  # fmt: skip


def backcopy_curves(axes: Any, results: dict[str, Any]) -> None:
    """Attention on the first token during training of each model."""
    runs = [
        (variant, trained["seeds"][0], VARIANTS[variant], "solid")
        for variant, trained in results["variants"].items()
    ]
    tries = zip(results["tries"].items(), OTHERS, strict=True)
    runs += [(f"none, {name}", trial, colour, "dashed") for (name, trial), colour in tries]
    for label, trained, colour, line in runs:
        steps, _, attention = zip(*trained["curve"], strict=True)
        axes.plot(steps, attention, color=colour, linestyle=line, label=label)
    axes.set(xlabel="steps of training", ylabel="share of attention on first token", ylim=(0, None))


def single_layer(axes: Any, results: dict[str, Any]) -> None:
    """Error of attention to a compressed prompt; median, minimum and maximum of seeds (BalanceKV,
    Figure 3)."""
    for name, by_rounds in results["summary"].items():
        kept = [100 / 2 ** int(number) for number in by_rounds]
        draw_spreads(axes, kept, by_rounds, label=name, **COMPRESSION[name])
    axes.set(xscale="log", xlabel="kept, of the tokens between the ends of the prompt (%)",
             ylabel="relative error of attention", ylim=(0, None))  # fmt: skip
    axes.set_xticks(kept, [f"{share:g}" for share in kept])
    axes.set_xticks([], minor=True)


def sparse(axes: Any, results: dict[str, Any]) -> None:
    """Loss after a prompt minus full attention's, with two standard errors over texts, by the
    share of the keys between the ends that is read."""
    perplexity = next(iter(results["perplexity"].values()))
    by_share = list(perplexity["shares"].values())
    names = [name for name in by_share[0] if ", " not in name]
    for name, style in zip(names, styles(names), strict=True):
        lines = [share[name] for share in by_share]
        at = [100 * line["share_read"]["mean"] for line in lines]
        errors = [line["over_full"]["two_errors"]["stretches"] for line in lines]
        losses = [line["over_full"]["mean"] for line in lines]
        axes.errorbar(at, losses, errors, marker="o", markersize=3, capsize=2, label=name, **style)
    ends, full = perplexity["ends alone"]["over_full"]["mean"], COLOURS["full"]
    axes.axhline(ends, color=full, linestyle="dotted", label="ends alone")
    axes.axhline(0, color=full, linewidth=0.8)
    axes.set(xscale="log", xlabel="keys read, of those between sinks and window (%)",
             ylabel="loss over full (nats per token)")  # fmt: skip
    ticks = [100 * float(share) for share in perplexity["shares"]]
    axes.set_xticks(ticks, [f"{share:g}" for share in ticks])
    axes.set_xticks([], minor=True)


def tune_lsh(axes: Any, results: dict[str, Any]) -> None:
    """Every K and L by share read and error, and the Pareto frontier; the line is the target
    error."""
    for colour, (name, model) in zip(OTHERS, results["models"].items(), strict=False):
        at = [100 * point["share"] for point in model["points"]]
        off = [point["error"]["mean"] for point in model["points"]]
        axes.scatter(at, off, s=6, alpha=0.3, linewidth=0, color=colour)
        for line, (kind, best) in zip(LINES, model["frontier"].items(), strict=False):
            axes.plot([100 * p["share"] for p in best], [p["error"] for p in best], color=colour,
                      linestyle=line, label=f"{name}, {kind}")  # fmt: skip
    axes.axhline(results["target"], color=COLOURS["full"], linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="keys read, of those between sinks and window (%)",
             ylabel="relative error of attention", xlim=(0.5, 100), ylim=(1e-3, None))  # fmt: skip


CHAPTERS: dict[str, dict[str, RecordPlot | FinishedPlot]] = {
    "Attention sinks": {
        "streaming_tables": RecordPlot("streaming_tables", streaming_plots.tables,
                "Sinks keep the loss level beyond the trained context", "upper left"),
        "first_token": RecordPlot("attention_maps", streaming_plots.first_token,
                "In later layers the first token gets much of the attention", "upper left"),
        "attention_maps": RecordPlot("attention_maps", streaming_plots.attention_maps,
                                  "Attention of the first tokens, by layer", height=2.4),
        "endless_135m": RecordPlot("endless_135m", streaming_plots.endless,
                                "One cache for a whole text costs no loss (SmolLM2-135M)"),
        "endless": RecordPlot("endless", streaming_plots.endless,
                           "One cache for a whole text costs no loss (small model)"),
        "latency": RecordPlot("latency", latency,
                           "Streaming decodes in constant time; re-computation does not"),
    },
    "Trained sinks": {
        "sinks_in_front": RecordPlot("sinks_in_front", training_plots.sinks_in_front,
                                  "One sink is enough for SmolLM2, whichever it is", OUTSIDE),
        "emergence": RecordPlot("emergence", training_plots.emergence,
                             "Small models grow no attention sink", OUTSIDE),
        "sink_tables": RecordPlot("sink_tables", sink_tables,
                               "Loss in training, by sink variant", "upper right"),
        "backcopy": RecordPlot("backcopy", backcopy,
                            "A trained sink must stay in the cache", "upper right"),
        "backcopy_curves": RecordPlot("backcopy", backcopy_curves,
                "Only trained sink tokens attract attention in this task", "center right"),
    },
    "Samples of evicted tokens": {
        "stream_losses": RecordPlot("stream_losses", reservoir_plots.stream_losses,
                                 "Loss of samples of the past, over streaming", height=5.4),
        "recall": FinishedPlot("recall",
                "A model reads facts among random letters and is then asked for one, whose value "
                "is one of eight. Mean over trained models, from the lowest to the highest. "
                "Dotted: tokens in a cache. Dashed: a guess.",
                "Bounded caches: which facts are still known"),
        "recall_compressed": FinishedPlot("recall",
                "The same task; the prompt is compressed before the question. Mean over trained "
                "models, from the lowest to the highest. Dashed: a guess.",
                "Compressed prompts: which facts are still known"),
    },
    "Prompt compression": {
        "peers": RecordPlot("peers", kvpress_parity.plot,
                            "jaxkv and kvpress give the same loss", OUTSIDE),
        "single_layer_135m": RecordPlot("single_layer_135m", single_layer,
                                     "Error of one compressed layer (SmolLM2-135M)", OUTSIDE),
        "single_layer": RecordPlot("single_layer", single_layer,
                                "Error of one compressed layer (small model)", OUTSIDE),
    },
    "Sparse attention": {
        "sparse": RecordPlot("sparse_135m", sparse,
                          "Loss by the share of keys that is read (SmolLM2-135M)", OUTSIDE),
        "sampling": FinishedPlot("sampling",
                "Error of attention to a share of the keys, with two standard errors; "
                "SmolLM2-135M.",
                "Error by the share of keys that is read (SmolLM2-135M)"),
        "sampling_budgets": FinishedPlot("sampling",
                "Top-k and sampling by weight, in SmolLM2-135M and with synthetic logits of "
                "standard deviation σ (MagicPIG, Figures 3 and 5).",
                "Where sampling beats top-k: spread-out attention"),
        "tune_lsh": RecordPlot("tune_lsh", tune_lsh, "Error of every K and L of the LSH index"),
    },
    "Prefix caching": {
        "prefix_report": RecordPlot("prefix_replay", plots.report,
                                 "Blocks found in the prefix cache", OUTSIDE),
        "prefix_items": RecordPlot("prefix_engine", plots.items,
                                "Throughput with and without the prefix cache", "lower left"),
        "prefix_snapshots": RecordPlot("prefix_replay", plots.snapshots,
                                    "Where to store states of evicting caches", OUTSIDE),
        "agents": FinishedPlot("agents",
                "Left: prompt tokens of agents' turns that need no prefill, by the number of "
                "stored states; the evicting policies save the same tokens. Right: memory. A full "
                "cache stores all its pages.",
                "Evicting caches share prefixes in a fraction of the memory"),
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
