"""Sinks on a laptop: bigram-backcopy streams (Guo et al. 2024, arXiv 2410.13835), and Table 3.

Letters follow a Markov chain, except for a few triggers: the letter after a trigger copies the one
before it. A copying head is idle at every other letter, and then attends to a token without
information, if there is one: a sink. Every variant is trained by `jaxkv pretrain` and reads
held-out letters under caches of one size, with and without its first tokens. Plain softmax is also
tried with more layers, another learning rate and more steps, because it might then grow a sink.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Derived, Statement, above, below, claim, within
from jaxkv.evals.streaming.tables import SAME
from jaxkv.evals.training.sink_tables import KINDS, logged, samples, table_3
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.training import letters
from jaxkv.models.training.data import DataFolder
from jaxkv.models.training.letters import LetterChain
from jaxkv.models.training.pretrain import pretrain
from jaxkv.models.training.recipes import PRESETS, Recipe
from jaxkv.typing import Float

FLOOR = 10**6, 99  # letters whose lowest loss is the floor, and their seed
VARIANTS = ("none", "zero", "logit", "token", "two_tokens")
TRIES = {  # of plain softmax
    "two layers": {"layers": 2},
    "three layers": {"layers": 3},
    "4 x lr": {"lr": 2e-2},
    "3 x the steps": {"steps": 2400},
}


FLAGS = (
    flag("--seeds", (0, 1, 2)),
    flag("--variants", VARIANTS, choices=VARIANTS),
    flag("--tries", tuple(TRIES), nargs="*", choices=TRIES),
    flag("--tokens", 100_000, "held-out letters to score", minimum=1),
    flag("--runs", type=Path, about="folder for data and runs (default: temporary)"),
)


def measure(run: Run) -> dict[str, Any]:
    """Train and score every variant with every seed, and the other recipes of plain softmax."""
    options, chain = run.options, LetterChain(0)
    with tempfile.TemporaryDirectory() as scratch:
        runs = options.runs or Path(scratch)
        tokens = letters.write(chain, runs / "data")
        ids = tokens.run("valid", 0, options.tokens).tolist()
        variants: dict[str, Any] = {}
        for variant in options.variants:
            by_seed = [
                train(recipe_of(variant, seed), chain, tokens, ids, runs / f"{variant}-{seed}")
                for seed in options.seeds
            ]
            variants[variant] = {"seeds": by_seed, "summary": summary(by_seed)}
        tries = {}
        for name in options.tries:
            recipe = dataclasses.replace(recipe_of("none", options.seeds[0]), **TRIES[name])
            trial = train(recipe, chain, tokens, ids, runs / name.replace(" ", "-"), name)
            tries[name] = {"changed": TRIES[name], **trial}
    return {
        "recipe": dataclasses.asdict(PRESETS["backcopy"]),
        "floor": chain.floor(chain.letters(*FLOOR)),
        "variants": variants,
        "tries": tries,
    }


def recipe_of(variant: str, seed: int) -> Recipe:
    return dataclasses.replace(PRESETS["backcopy"], sink_variant=variant, seed=seed)


def train(
    recipe: Recipe,
    chain: LetterChain,
    tokens: DataFolder,
    ids: Sequence[int],
    out: Path,
    name: str = "",
) -> dict[str, Any]:
    """Train one model and score the held-out letters."""
    llm = models.load(pretrain(recipe, tokens, out, tell=lambda text: None))
    log = logged(out)
    cache = llm.config.context // 2
    lines = table_3(llm, ids, cache)
    mass = dormant(llm, chain, ids, cache)
    shown = ", ".join(f"{name} {line['loss']:.4f}" for name, line in lines.items())
    print(
        f"{recipe.sink_variant}{', ' * bool(name)}{name}, seed {recipe.seed}: first token "
        f"{mass.mean():.2f}, {mass.max():.2f}; {shown}",
        flush=True,
    )
    return {
        "seed": recipe.seed,
        "seconds": log[-1]["seconds"],
        "curve": [[x["step"], x["valid_loss"], x["first_token"]] for x in log if "text" in x],
        "loss": lines,
        "first_token": float(mass.mean()),
        "first_token_most": float(mass.max()),
        "sink_letters": float(np.mean(mass > uncached.SINK_HEAD)),
    }


def dormant(llm: Llm, chain: LetterChain, ids: Sequence[int], skip: int) -> Float[np.ndarray, " V"]:
    """Mean attention of each idle letter to the first token, in the layer with the largest mean."""
    runs = samples(llm, {"valid": np.array(ids)}, llm.config.context)
    seen = uncached.forward(llm.config, llm.weights, runs, uncached.attend_with_probabilities)[2]
    letters = runs[:, skip:]
    idle = np.setdiff1d(letters, chain.triggers)
    layers = [np.asarray(layer)[:, 0, skip:, 0] for layer in seen]
    by_layer = [[mass[letters == letter].mean() for letter in idle] for mass in layers]
    return max(np.array(by_layer), key=np.mean)


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ranges over the seeds."""
    return {
        name: spread([seed[name] for seed in seeds])
        for name in ("first_token", "first_token_most", "sink_letters")
    } | {
        measure: {
            cache: spread([seed["loss"][cache][measure] for seed in seeds])
            for cache in seeds[0]["loss"]
        }
        for measure in ("loss", "loss_over_base")
    }


def over_four(kind: str, *sizes: str) -> Derived:
    """The loss of a variant with fewer first tokens in the cache, minus that with four."""
    return lambda results: {
        f"{kind} {size}": results["variants"][kind]["summary"]["loss_over_base"][size]
        for size in sizes
    }


MEASURE = Measure("backcopy", measure, FLAGS)
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


if __name__ == "__main__":
    run(MEASURE)
