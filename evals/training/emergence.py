"""When heads become attention sinks: the share of the first token in the course of training.

Reads the logs of runs of `jaxkv pretrain`. Each evaluation of a run measures the attention on the
first token, as Gu et al. (2024, arXiv 2410.10781) do for models of 60 million weights and more.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, within
from jaxkv.evals.training.sink_tables import KINDS, variant_of_record


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
        if variant_of_record(run) in sinks
    }


def runs_table() -> str:
    """A row per run, at its end."""
    heads = ("preset", "trained with", "million tokens", "validation loss",
             "largest attention of a head")  # fmt: skip
    cells = (
        (f"`{name.split()[0]}`", KINDS[variant_of_record(trained)],
         f"{trained['million_tokens'][-1]:.0f}", f"{trained['valid_loss'][-1]:.3f}",
         f"{trained['first_token_most'][-1]:.3f}")
        for name, trained in read("emergence")["results"]["runs"].items()
    )  # fmt: skip
    return table(heads, cells, "One run of each, at its end. Attention: on the first token.")


TABLES = {"emergence": runs_table}
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
