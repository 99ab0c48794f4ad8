"""Sinks on a laptop: bigram-backcopy streams (Guo et al. 2024, arXiv 2410.13835), and Table 3.

Letters follow a Markov chain, except for a few triggers: the letter after a trigger copies the one
before it. A copying head is idle at every other letter, and then attends to a token without
information, if there is one: a sink. Every variant was trained by `jaxkv pretrain` and read
held-out letters under caches of one size, with and without its first tokens. Plain softmax was also
tried with more layers, another learning rate and more steps, because it might then grow a sink. The
commit of the record has its command; notebook 04 trains the same recipe.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Derived, Statement, above, below, claim, within
from jaxkv.evals.streaming.tables import SAME
from jaxkv.evals.training.sink_tables import KINDS


def over_four(kind: str, *sizes: str) -> Derived:
    """The loss of a variant with fewer first tokens in the cache, minus that with four."""
    return lambda results: {
        f"{kind} {size}": results["variants"][kind]["summary"]["loss_over_base"][size]
        for size in sizes
    }


CLAIMS = (
    claim("Table 3; stream of Guo et al. 2024 (arXiv 2410.13835)",
          "With a mostly idle head, a trained sink token is needed and enough; plain softmax needs "
          "more", "backcopy",
          above(over_four("token", "0+24"), by=SAME), within(over_four("token", "1+23"), by=SAME),
          above(over_four("none", "1+23"), by=SAME)),
    claim("appendix: no gain from a second",
          "Without the second of two trained sink tokens, the loss rises by over 0.02 nats",
          "backcopy", above(over_four("two_tokens", "1+23"), by=SAME)),
)  # fmt: skip


def variants_table() -> str:
    """A row per variant, and per other recipe of plain softmax."""
    results = read("backcopy")["results"]
    sizes = list(results["variants"]["none"]["summary"]["loss_over_base"])[:-1]
    cells = []
    for kind, variant in results["variants"].items():
        medians = variant["summary"]
        over = [rounded(medians["loss_over_base"][size]) for size in sizes]
        loss, attention = (medians["loss"]["4+20"], medians["first_token"])
        cells.append((KINDS[kind], ranged(loss, "median", ".3f"), *over,
                      ranged(attention, "median", ".2f")))  # fmt: skip
    for name, trial in results["tries"].items():
        over = [f"{round(trial['loss'][size]['loss_over_base'], 3) + 0.0:+.3f}" for size in sizes]
        loss, attention = trial["loss"]["4+20"]["loss"], trial["first_token"]
        cells.append((f"plain softmax, {name}", f"{loss:.3f}", *over, f"{attention:.2f}"))
    seeds = len(results["variants"]["none"]["seeds"])
    caption = f"Medians of {seeds} seeds, with the range. `s+w`: loss minus that of 4+20."
    heads = ("trained with", "loss of 4+20", *sizes, "attention on the first token")
    return table(heads, cells, caption)


def rounded(differences: dict[str, float]) -> str:
    """The median and the range of differences, without a sign of zero."""
    values = {name: round(x, 3) + 0.0 for name, x in differences.items()}
    return ranged(values, "median", "+.3f")


TABLES = {"backcopy": variants_table}
PAGE = "docs/results/training.md"
STATEMENTS = (
    Statement(PAGE, "A model with a trained sink token loses over 0.1 nats when the cache evicts "
              "it, and needs no other sink", "backcopy",
              [*(above(over_four(kind, "0+24"), 0.1) for kind in ("token", "two_tokens")),
               within(over_four("token", "1+23"), by=0.001),
               within(over_four("two_tokens", "2+22"), by=0.001)]),
    Statement(PAGE, "Models with plain softmax, a zero sink or sink logits learn no sink and need "
              "none", "backcopy",
              [within(over_four(kind, "0+24", "1+23"), by=0.001)
               for kind in ("none", "zero", "logit")]
              + [below(f"variants/{kind}/summary/first_token", 0.01)
                 for kind in ("none", "zero", "logit")]),
    Statement(PAGE, "Other recipes of plain softmax learn no sink either", "backcopy",
              [below("tries/{name}/first_token", 0.01)]),
)  # fmt: skip
