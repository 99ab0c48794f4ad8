"""When heads become attention sinks: the share of the first token in the course of training.

Reads the logs of runs of `jaxkv pretrain`. Each evaluation of a run measures the attention on the
first token, as Gu et al. (2024, arXiv 2410.10781) do for models of 60 million weights and more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.evals.lib.record import Record, make_parser, read, run_command
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, within
from jaxkv.evals.training.plots import KINDS
from jaxkv.evals.training.sink_tables import evaluations, settings


def main() -> None:
    parser = make_parser("jaxkv.evals.training.emergence", __doc__)
    parser.add_argument("--runs", required=True, type=Path, nargs="+", metavar="SIZE/SINKS",
                        help="folders of runs")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    options = parser.parse_args()
    runs = {f"{folder.parent.name} {folder.name}": curve(folder) for folder in options.runs}
    record = Record("emergence", quick=options.quick)
    # The measurements are those of the runs, not of the machine that reads their logs.
    record.about["device"] = ", ".join(sorted({run["device"] for run in runs.values()}))
    record.finish({"runs": runs})


def curve(folder: Path) -> dict[str, Any]:
    """A run's loss and attention on the first token, by million tokens of training."""
    about, looks = settings(folder), evaluations(folder)
    recipe = about["recipe"]
    million = recipe["batch_size"] * recipe["context"] / 1e6
    return {
        "recipe": recipe,
        "data": about["data"],
        "dtype": about["dtype"],
        "device": looks[-1]["device"],
        "jax": looks[-1]["jax"],
        "million_tokens": [million * x["step"] for x in looks],
        "valid_loss": [x["valid_loss"] for x in looks],
        "first_token": [x["first_token"] for x in looks],
        "first_token_most": [x["first_token_most"] for x in looks],
        "sink_heads": [x["sink_heads"] for x in looks],
    }


def sink_token_gains(results: Results) -> dict[str, float]:
    """By preset, the last validation loss with a sink token minus that without."""
    runs = results["runs"]
    return {
        size: runs[f"{size} token"]["valid_loss"][-1] - runs[f"{size} none"]["valid_loss"][-1]
        for size in ("tiny", "small")
    }


def largest_attention(*sinks: str) -> Derived:
    """The largest attention of a head on the first token, at the end of the runs of these sinks."""
    return lambda results: {
        name: run["first_token_most"][-1]
        for name, run in results["runs"].items()
        if run["recipe"]["sinks"] in sinks
    }


def table() -> str:
    """A row per run, at its end."""
    lines = table_head(
        "preset", "trained with", "million tokens", "validation loss",
        "largest attention of a head",
    )  # fmt: skip
    for name, run in read("emergence")["results"]["runs"].items():
        tokens, loss = run["million_tokens"][-1], run["valid_loss"][-1]
        cells = (f"{tokens:.0f}", f"{loss:.3f}", f"{run['first_token_most'][-1]:.3f}")
        lines.append(table_row(f"`{name.split()[0]}`", KINDS[run["recipe"]["sinks"]], *cells))
    caption = "One run of each, at its end. Attention: on the first token."
    return page_table(lines, caption)


TABLES = {"emergence": table}
NEGATIVE = "evals/NEGATIVE.md"
STATEMENTS = (
    Statement(NEGATIVE, "No head gives the first token a tenth of its attention", "emergence",
              [below("runs/{run}/first_token_most/{evaluation}", 0.1)]),
    Statement(NEGATIVE, "most of its heads are sink heads", "attention_maps",
              [above("sink_metric", 0.5)]),
    Statement(NEGATIVE, "A sink token changes the validation loss by less than 0.15 nats per token",
              "emergence", [within(sink_token_gains, by=0.15)]),
    Statement("docs/results/training.md", "no head gives the first token a tenth of its attention, "
              "and without a sink token not even a hundredth", "emergence",
              [below(largest_attention(*KINDS), 0.1),
               below(largest_attention("none", "zero", "logit"), 0.01)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
