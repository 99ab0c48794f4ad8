"""Sinks in front of a model that exists: StreamingLLM's Table 3 without a model trained for it.

The same stretches of text are read under caches of equal size: by the model as it is (plain), with
a token that begins every stream (constant), and with what `jaxkv pretrain --from` made of the
model; --variants zero adds a zero sink that nobody trained. Each stretch begins elsewhere in its
text, so the first token, on which the plain model depends, differs.
Losses are kept under out/, so that an interrupted run continues, and several processes can measure
a few cache sizes each.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.cli.files import read_text
from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, claim, within
from jaxkv.evals.streaming.tables import SAME
from jaxkv.evals.training.sink_tables import (
    SINKS,
    evaluations,
    line,
    logged,
    read_losses,
    recipe_of_record,
    settings,
)
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.sinks import FILE
from jaxkv.models.training.data import sha256_of

BASE = "plain"
SIZE = 256  # of the cache that statements compare
FOUR = 4  # sinks of the plain cache that others are compared with, as in the paper
LIMIT = 0.002  # nats: how far one constant sink may be above the plain cache with four


FLAGS = (
    flag("--variants", (), "folders of `jaxkv pretrain --from MODEL`; zero: untrained",
         nargs="*", metavar="NAME=RUN"),
    flag("--windows", (256, 1024), "cache sizes", minimum=2),
    flag("--sinks", SINKS, "numbers of sinks", minimum=0),
    flag("--starts", 3, "stretches of each text", minimum=1),
    flag("--tokens", 8_000, "tokens of a stretch", minimum=2),
    flag("--constant", "constant", "the constant sink, as --sinks has it"),
)  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """The losses of every variant with every number of sinks."""
    options, plain = run.options, run.llm
    runs = dict(variant.partition("=")[::2] for variant in options.variants)
    stretches = cut(plain, options.texts, options.starts, options.tokens)
    counts = {name: options.sinks for name in ("constant", *runs)}
    counts[BASE] = sorted({FOUR, *options.sinks})  # all are compared with four
    cases = len(options.windows) * sum(map(len, counts.values()))
    parts = Parts(run.record, cases * len(stretches))
    losses: dict[str, dict[str, Any]] = {}
    for name in [BASE, "constant", *runs]:
        llm, hash_ = variant(name, plain, options, runs), hash_of(runs.get(name))
        losses[name] = {}
        for s, w in [(s, w) for w in options.windows for s in counts[name]]:
            key = f"{plain.name}, {name} {hash_}, {s}+{w - s}"
            losses[name][f"{s}+{w - s}"] = {
                at: parts.part(
                    f"{key}, {options.tokens} of {at}",
                    partial(read_losses, llm, ids, s, w),
                )
                for at, ids in stretches.items()
            }
        for size, by_stretch in losses[name].items():
            mean = np.mean(np.concatenate(list(by_stretch.values())))
            print(f"{name}: {size}: {mean:.4f} nats", flush=True)
    return {
        "runs": {name: described(Path(folder)) for name, folder in runs.items() if folder},
        "stretches": {at: len(ids) for at, ids in stretches.items()},
        "first_tokens": {at: plain.tokenizer.decode(ids[:1]) for at, ids in stretches.items()},
        "variants": tables(losses),
        "bars": bars(losses, options.windows),
    }


def cut(llm: Llm, texts: Sequence[Path], starts: int, tokens: int) -> dict[str, list[int]]:
    """Stretches of equal length, evenly spaced in each text, without a BOS."""
    stretches = {}
    for path in texts:
        ids = llm.tokenizer.encode(read_text(str(path), "text"), bos=False)
        if len(ids) < tokens:
            raise UserError(f"{path.name} has {len(ids)} tokens, a stretch {tokens}: give --tokens")
        for at in np.linspace(0, len(ids) - tokens, starts).astype(int).tolist():
            stretches[f"{path.stem} {at}"] = ids[at : at + tokens]
    return stretches


def variant(name: str, plain: Llm, options: argparse.Namespace, runs: dict[str, str]) -> Llm:
    """The model with the sinks of one variant."""
    if name == BASE:
        return plain
    if name == "constant":
        return models.load(options.model, "float32", sinks=options.constant)
    if name in runs and not runs[name]:
        if name != "zero":
            raise UserError(f"a variant is NAME=RUN or zero, got {name}")
        config = dataclasses.replace(plain.config, sink_logit="zero")
        return dataclasses.replace(plain, config=config)
    file, model = Path(runs[name]) / FILE, Path(runs[name]) / "hf"
    return models.load(
        model if model.is_dir() else options.model,
        "float32",
        sinks=file if file.is_file() else None,
    )


def hash_of(run: str | None) -> str:
    """A hash of what a run exported; empty for a variant without a run."""
    files = (*Path(run).glob(FILE), *Path(run).glob("hf/*.safetensors")) if run else ()
    return " ".join(sha256_of(file)[:12] for file in files)


def described(run: Path) -> dict[str, Any]:
    """The recipe of a run, its losses by step, and the bytes of its file of sinks."""
    file = run / FILE
    log, looks = logged(run), evaluations(run)
    return {
        "recipe": settings(run)["recipe"],
        "device": looks[-1]["device"],
        "seconds": log[-1]["seconds"],
        "loss": [[line["step"], line["loss"]] for line in log],
        "valid_loss": [[line["step"], line["valid_loss"]] for line in looks],
        "first_token": looks[-1]["first_token"],
        "file_bytes": file.stat().st_size if file.exists() else None,
    }


def tables(losses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per variant and cache: the loss of all stretches, and over the plain cache of four sinks."""
    lines: dict[str, Any] = {}
    for name, sizes in losses.items():
        lines[name] = {}
        for size, by_stretch in sizes.items():
            base = losses[BASE][four(size)]
            arrays = [np.concatenate(list(part.values())) for part in (by_stretch, base)]
            over_base = {at: loss.mean() - base[at].mean() for at, loss in by_stretch.items()}
            lines[name][size] = line(*arrays) | {"over_base_by_stretch": over_base}
    return lines


def four(size: str) -> str:
    """The plain cache that a cache is compared with."""
    total = sum(map(int, size.split("+")))
    return f"{FOUR}+{total - FOUR}"


def bars(losses: dict[str, dict[str, Any]], windows: Sequence[int]) -> list[dict[str, Any]]:
    """Whether one constant sink is as good as four tokens of the text, in every stretch."""
    lines = []
    for window in windows:
        size = f"1+{window - 1}"
        mine, base = losses["constant"].get(size), losses[BASE][four(size)]
        if mine is None:  # --sinks without 1
            continue
        worst = max(mine[at].mean() - base[at].mean() for at in mine)
        lines.append({"bar": f"one constant sink in a cache of {window}, worst stretch",
                      "value": worst, "ask": f"at most {LIMIT} nats over four sinks",
                      "met": bool(worst <= LIMIT)})  # fmt: skip
    return lines


def by_stretch(results: Results, name: str, sinks: int) -> np.ndarray:
    """By stretch, the loss of a variant minus that of the published model with four sinks, in a
    cache of SIZE tokens; the mean over the seeds of the variant."""
    seeds = [key for key in results["variants"] if key.partition("-")[0] == name]
    rows = (results["variants"][key][f"{sinks}+{SIZE - sinks}"] for key in seeds)
    return np.mean([list(row["over_base_by_stretch"].values()) for row in rows], axis=0)


def loss(name: str, sinks: int) -> Derived:
    """The loss of a variant minus that of the published model with four sinks."""
    return lambda results: {label(name, sinks): by_stretch(results, name, sinks).tolist()}


def gap(name: str, sinks: int, base: str, base_sinks: int) -> Derived:
    """The loss of a variant minus that of another variant, or with other sinks."""
    return lambda results: {
        f"{label(name, sinks)} over {label(base, base_sinks)}": (
            by_stretch(results, name, sinks) - by_stretch(results, base, base_sinks)
        ).tolist()
    }


def label(name: str, sinks: int) -> str:
    return f"{name} {sinks}+{SIZE - sinks}"


MEASURE = Measure("sinks_in_front", measure, FLAGS, model=SMOLLM2, texts=1)
NOT_IN_PAPERS = "not in the papers"
CLAIMS = (
    claim("Table 3, vanilla",
          "The published model loses over 0.02 nats with none of its first tokens, and with one",
          "sinks_in_front", above(loss(BASE, 0), by=SAME), above(loss(BASE, 1), by=SAME)),
    claim("Table 3, learnable sink",
          "With all weights trained on, a sink token is needed and enough; without it more first "
          "tokens are needed", "sinks_in_front",
          above(gap("all_token", 0, "all_token", FOUR), by=SAME),
          within(gap("all_token", 1, "all_token", FOUR), by=SAME),
          above(gap("all_none", 1, "all_none", FOUR), by=SAME)),
    claim(f"{NOT_IN_PAPERS}; PrefixQuant (Chen et al. 2024, arXiv 2410.05265)",
          "One constant token in front of every stream loses under 0.02 nats to four first tokens",
          "sinks_in_front", below(loss("constant", 1), SAME)),
    claim(NOT_IN_PAPERS, "One trained vector in front of a frozen model loses nothing to four "
          "first tokens", "sinks_in_front", below(loss("frozen_token", 1))),
    claim(NOT_IN_PAPERS, "Logits per head, trained in a frozen model, lower the loss without first "
          "tokens by over 0.3 nats, to under 0.02 nats above four first tokens", "sinks_distilled",
          below(gap("text", 0, BASE, 0), by=0.3), below(loss("text", 0), SAME)),
    claim(NOT_IN_PAPERS, "Logits distilled from the model lose over 0.02 nats less than logits "
          "trained on text", "sinks_distilled", below(gap("distilled", 0, "text", 0), by=SAME)),
)  # fmt: skip
ROWS = (  # of the table: record, variant, and how the model was changed
    ("sinks_in_front", "plain", "as published"),
    ("sinks_in_front", "constant", "constant token in front, not trained"),
    ("sinks_in_front", "zero", "zero sink, not trained"),
    ("sinks_in_front", "frozen_logit", "sink logits, all else frozen"),
    ("sinks_distilled", "text", "sink logits, learning rate 0.1"),
    ("sinks_distilled", "distilled", "sink logits, distilled, learning rate 0.1"),
    ("sinks_in_front", "frozen_token", "sink token, all else frozen"),
    ("sinks_in_front", "frozen_two_tokens", "two sink tokens, all else frozen"),
    ("sinks_in_front", "all_none", "all weights, no sink"),
    ("sinks_in_front", "all_logit", "all weights, sink logits"),
    ("sinks_in_front", "all_token", "all weights, sink token"),
)


def variants_table() -> str:
    """A row per variant, by the number of first tokens in the cache."""
    records = {name: read(name)["results"] for name in dict.fromkeys(row[0] for row in ROWS)}
    cells = []
    for record, name, label in ROWS:
        measured = next(x for k, x in records[record]["variants"].items() if k.startswith(name))
        counts = {int(size.partition("+")[0]) for size in measured}
        losses = {n: by_stretch(records[record], name, n).mean() for n in counts & {*SINKS}}
        shown = (f"{round(losses[n], 3) + 0.0:+.3f}" if n in losses else "" for n in SINKS)
        cells.append((label, *shown))
    front, distilled = records.values()
    stretches = front["stretches"]
    trained = [recipe_of_record(results["runs"][run]["recipe"]) for results, run in
               ((front, "frozen_token-0"), (distilled, "text-0"))]  # fmt: skip
    samples = [
        f"{recipe['steps'] * recipe['batch_size']} samples of {recipe['context']:,} tokens"
        for recipe in trained
    ]
    caption = (
        f"{len(stretches)} stretches of {next(iter(stretches.values())):,} tokens in a cache of "
        f"{SIZE}. Trained on {samples[0]}; at a learning rate of 0.1, on {samples[1]}. Means of "
        "three seeds with one sink token, else one seed."
    )
    return table(["variant", *SINKS], cells, caption)


TABLES = {"sinks_in_front": variants_table}
PAGE, NEGATIVE = "docs/results/training.md", "evals/NEGATIVE.md"
COMPRESSED = ("learned", "snapkv", "pyramidkv", "keydiff", "balance", "uniform", "streaming")


def lead_of_pairs(results: Results) -> dict[str, float]:
    """By kind of text and document, how far the best policy loses more than trained pairs."""
    leads = {}
    for kind in ("following", "spans", "facts"):
        pairs, *policies = (
            results["variants"][name][kind]["over_full_by_document"] for name in COMPRESSED
        )
        for document, difference in enumerate(np.min(policies, axis=0) - pairs):
            leads[f"{kind}, document {document}"] = float(difference)
    return leads


STATEMENTS = (
    Statement(PAGE, "most of its heads are sink heads", "attention_maps",
              [above("sink_metric", 0.5)]),
    Statement(PAGE, "One first token is as good as four, whichever token it is", "sinks_in_front",
              [within(gap(name, 1, name, FOUR), by=SAME) for name in (BASE, "constant")]),
    Statement(PAGE, "A sink token makes no difference to continued training of all weights",
              "sinks_in_front", [within(gap("all_token", 1, "all_none", 1), by=SAME)]),
    Statement(PAGE, "One trained vector lowers the loss of the frozen model a little",
              "sinks_in_front", [below(loss("frozen_token", 1))]),
    Statement(PAGE, "the published model loses over half a nat. With sink logits at a high "
              "learning rate, a window without first tokens loses under a tenth of a nat",
              "sinks_distilled", [above(loss(BASE, 0), 0.5), below(loss("text", 0), 0.1)]),
    Statement(PAGE, "Distilling them gains nothing", "sinks_distilled",
              [above(gap("distilled", 0, "text", 0), by=-SAME)]),
    Statement(PAGE, "Without first tokens, the loss is lowest with sink logits and all weights "
              "trained",
              "sinks_in_front", [below(gap("all_logit", 0, name, 0)) for name in
                                 ("frozen_logit", "all_none", "all_token", "plain", "zero")]),
    Statement(PAGE, "In a frozen model that still caches its first token they raise the loss",
              "sinks_in_front", [above(loss("frozen_logit", 1))]),
    Statement(NEGATIVE, "The trained pairs lose least of all caches of equal bytes",
              "learned_memory", [above(lead_of_pairs)]),
    Statement(NEGATIVE, "they recall none of the six facts that full attention recalls, and "
              "neither does any compressed cache", "learned_memory",
              [within("variants/full/facts/recalled", 6),
               *(within(f"variants/{name}/facts/recalled") for name in COMPRESSED)]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
