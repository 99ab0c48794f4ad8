"""Models trained with and without sinks: StreamingLLM's Table 3, Figures 2, 6 and 7.

Every run is a folder of `jaxkv pretrain`, one per variant; only `sinks` differs. All variants read
the same text under caches of equal size. The results of each variant are stored under out/, so an
interrupted run continues, and processes that measure one variant each leave little to the one that
writes all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import files, models
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import TRIALS, dumps, plain, read, standard_error
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, claim, within
from jaxkv.evals.streaming.tables import SAME
from jaxkv.models.generation.score import gather
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights
from jaxkv.models.tools import pictures
from jaxkv.models.tools.run_metadata import sha256
from jaxkv.typing import Array, Float32, Int32

SINKS = (0, 1, 2, 4)
KINDS = {  # variants of training, as tables name them
    "none": "plain softmax",
    "zero": "zero sink",
    "logit": "sink logits",
    "token": "sink token",
    "two_tokens": "two sink tokens",
}
SPAN = 1_000  # losses per mean for standard errors, because nearby losses are correlated
SHOWN = 16  # tokens per sample in the attention maps, as in Figure 2
SAMPLES = 64  # samples per attention map


FLAGS = (
    flag("--runs", type=Path, required=True, nargs="+", about="folders of runs"),
    flag("--texts", type=Path, required=True, nargs="+",
         about="held-out text files, or folders of *.txt"),
    flag("--tokens", 100_000, minimum=2),
)  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """The tables of every variant, whose runs are folders; draws the attention of a sink token."""
    options, record = run.options, run.record
    runs = list(map(settings, options.runs))
    names = [f"{about['recipe']['sink_variant']}-{about['recipe']['seed']}" for about in runs]
    check(names, runs)
    texts, files_read = texts_of(options.texts, options.tokens, options.runs[0])
    record.add(files_read)
    variants: dict[str, Any] = {}
    case = [options.tokens, record.about["data"]]
    for folder, about, variant in zip(options.runs, runs, names, strict=True):
        llm = models.load(folder / "hf")
        weights = sha256(folder / "hf" / "model.safetensors")
        key = hashlib.sha256(json.dumps([weights, *case]).encode()).hexdigest()[:16]
        stored = TRIALS / "sink_tables.parts" / f"{variant}-{key}.json"
        if not stored.exists():
            stored.parent.mkdir(parents=True, exist_ok=True)
            files.write({stored: dumps(plain(tables(llm, texts, variant))).encode()})
        variants[variant] = trained(folder, about, llm) | json.loads(stored.read_text("utf-8"))
        if about["recipe"]["sink_variant"] == "token":
            picture = record.file.with_name(f"sink_tables_{variant}.png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(draw(llm, texts, variant))
    record.about["seeds"] = sorted({variant["recipe"]["seed"] for variant in variants.values()})
    return {"variants": variants}


def texts_of(
    paths: Sequence[Path], tokens: int, run: Path
) -> tuple[dict[str, list[int]], list[Path]]:
    """The beginnings of texts by name, without front tokens, which differ by variant; the files."""
    first, texts, files_read = models.load(run / "hf"), {}, []
    for path in paths:
        if path.stem in texts or (path / "manifest.json").exists():
            raise UserError(
                f"texts need names of their own, and no split for training, got {path}; name others"
            )
        ids, read_now = tokens_of(first, path, tokens + 1)
        texts[path.stem] = ids[len(first.tokenizer.front) :]
        files_read += read_now
    return texts, files_read


def check(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> None:
    """Exit if two runs have the same variant and seed, or differ in another setting."""
    if len(set(names)) < len(names):
        raise UserError(
            f"runs must be variants and seeds of their own, got {', '.join(names)}; leave one out"
        )
    for about in runs[1:]:
        mine, first = (
            {**x, **x["recipe"], "sink_variant": 0, "seed": 0, "recipe": 0}
            for x in (about, runs[0])
        )
        differ = [key for key in mine if mine[key] != first.get(key)]
        if differ:
            raise UserError(
                f"runs must be alike but for sink_variant and seed, differ: {differ}; leave one out"
            )


def trained(folder: Path, about: dict[str, Any], llm: Llm) -> dict[str, Any]:
    """The settings of a run, and its loss curve (Figure 6)."""
    log = logged(folder)
    looks = evaluations(folder)
    recipe = about["recipe"]
    return {
        "recipe": recipe,
        "data": about["data"],
        "dtype": about["dtype"],
        "weights": sum(weight.size for weight in llm.weights.values()),
        "tokens": recipe["steps"] * recipe["batch_size"] * recipe["context"],
        "seconds": log[-1]["seconds"],
        "device": log[-1].get("device"),
        "valid_loss": looks[-1]["valid_loss"],
        "curve": [[x["step"], x["valid_loss"], x["first_token"], x["sink_heads"]] for x in looks],
    }


RENAMED = {  # the present name of a recipe's field, by its older one
    "rows": "batch_size",
    "accumulate": "grad_accum_steps",
    "last_lr": "final_lr_ratio",
    "look_every": "eval_every",
    "sinks": "sink_variant",
}
REMOVED = "decay", "cooldown"  # of a second schedule, which no record used


def recipe_of_record(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a record, with the present fields and their names."""
    return {RENAMED.get(n, n): value for n, value in recipe.items() if n not in REMOVED}


def variant_of_record(run: dict[str, Any]) -> str:
    """The sink variant with which the model of a record was trained."""
    return recipe_of_record(run["recipe"])["sink_variant"]


def settings(run: Path) -> dict[str, Any]:
    """The recipe, data and dtype of a run."""
    return json.loads((run / "run.json").read_text("utf-8"))


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log with its loss on the validation split."""
    return [line for line in logged(run) if "valid_loss" in line]


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(text) for text in (run / "log.jsonl").read_text("utf-8").splitlines()]


def tables(llm: Llm, texts: dict, variant: str) -> dict[str, Any]:
    """All measurements of one variant's model."""
    cache = llm.config.context // 2
    results: dict[str, Any] = {"cache": cache, "perplexity": {}}
    for name, text in texts.items():
        lines = table_3(llm, text, cache)
        shown = ", ".join(f"{key} {line['perplexity']:.3f}" for key, line in lines.items())
        print(f"{variant}: {name}: {shown}", flush=True)
        results["perplexity"][name] = {"predictions": len(text) - 1, **lines}
    mass = first_token(llm, texts)
    results["first_token"] = {
        "by_head": mass.tolist(),
        "mean": mass.mean(),
        "most": mass.max(),
        "heads_above": float((mass > uncached.SINK_HEAD).mean()),
    }
    return results


def table_3(llm: Llm, text: Sequence[int], cache: int) -> dict[str, dict[str, float]]:
    """Losses with each number of sinks in a cache of one size, and minus those with 4 sinks."""
    losses = {sinks: read_losses(llm, text, sinks, cache) for sinks in SINKS}
    return {f"{s}+{cache - s}": line(loss, losses[4]) for s, loss in losses.items()}


def read_losses(llm: Llm, ids: Sequence[int], sinks: int, cache: int) -> np.ndarray:
    """The losses of all tokens of a text but its first, which some variants do not predict."""
    policy = f"streaming:sinks={sinks},window={cache - sinks}"
    token_losses, *_ = gather(models.losses(llm, [*llm.tokenizer.front, *ids], policy))
    return token_losses[-len(ids) + 1 :].astype(np.float64)


def line(loss: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Perplexity, and the mean difference of paired losses."""
    difference = loss - base
    spans = difference[: len(loss) - len(loss) % SPAN].reshape(-1, SPAN).mean(1)
    return {
        "perplexity": np.exp(loss.mean()),
        "loss": loss.mean(),
        "loss_over_base": difference.mean(),
        "standard_error": standard_error(spans) or 0.0,
    }


def samples(llm: Llm, texts: dict, length: int) -> Int32[np.ndarray, "B T"]:
    """Evenly spaced runs of the texts, as training samples with sink tokens in front."""
    ids = np.concatenate(list(texts.values()))
    at = np.linspace(0, len(ids) - length, SAMPLES).astype(int)
    runs = np.stack([ids[a : a + length] for a in at]).astype(np.int32)
    runs[:, : len(llm.tokenizer.front)] = llm.tokenizer.front
    return runs


def first_token(llm: Llm, texts: dict) -> Float32[np.ndarray, "L N"]:
    """Mean attention on the first token of samples of full length, without their first queries."""
    context = llm.config.context
    runs, skip = samples(llm, texts, context), min(64, context // 2)
    mass = partial(uncached.mass_on_first, llm.config, llm.weights)
    return np.mean([mass(runs[a : a + 4], skip) for a in range(0, SAMPLES, 4)], axis=0)


@partial(jax.jit, static_argnums=0)
def maps(config: Config, weights: Weights, ids: Int32[Array, "B T"]) -> Float32[Array, "L N T T"]:
    """Attention of every layer and head, averaged over samples."""
    _, _, seen = uncached.forward(config, weights, ids, uncached.attend_with_probabilities)
    return jnp.stack([jnp.mean(layer, axis=0) for layer in seen])


def draw(llm: Llm, texts: dict, variant: str) -> bytes:
    """Figures 2 and 7: the attention of every head, as a PNG."""
    from matplotlib.figure import Figure

    seen = np.asarray(maps(llm.config, llm.weights, samples(llm, texts, SHOWN)))
    layers, heads = seen.shape[:2]
    figure = Figure(figsize=(1.1 * heads + 1, 1.1 * layers + 0.8), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    for (layer, head), axes in np.ndenumerate(grid):
        hidden = np.triu(np.ones((SHOWN, SHOWN), bool), 1)
        picture = axes.imshow(np.ma.masked_where(hidden, seen[layer, head]), vmin=0, vmax=1,
                              cmap="viridis")  # fmt: skip
        axes.set_xticks([])
        axes.set_yticks([])
        if head == 0:
            axes.set_ylabel(f"layer {layer}", fontsize=8)
        if layer == layers - 1:
            axes.set_xlabel(f"head {head}", fontsize=8)
    figure.colorbar(picture, ax=grid, shrink=0.6, label="attention")
    front = len(llm.tokenizer.front)
    caption = (
        f"sink_variant={variant}: attention of {SHOWN} queries (down) to {SHOWN} keys (across), "
        f"mean of {SAMPLES} samples" + (f", {front} sink token(s) first" if front else "")
    )
    return pictures.finish(figure, caption)


def losses(kind: str, count: int) -> Derived:
    """By model and text, the loss with so many first tokens in the cache minus that with four."""
    return lambda results: {
        f"{name}, {text}": row
        for name, model in results["variants"].items()
        if variant_of_record(model) == kind
        for text, rows in model["perplexity"].items()
        for size, row in rows.items()
        if size.startswith(f"{count}+")
    }


def raised_loss(results: Results) -> dict[str, list[float]]:
    """The validation loss with a sink token minus that of plain softmax, by seed."""
    runs = results["variants"].values()
    loss = {(variant_of_record(x), x["recipe"]["seed"]): x["valid_loss"] for x in runs}
    seeds = [seed for kind, seed in loss if kind == "none" and ("token", seed) in loss]
    return {"token": [loss["token", seed] - loss["none", seed] for seed in seeds]} if seeds else {}


def paired_seeds(results: Results) -> dict[str, int]:
    return {name: len(differences) for name, differences in raised_loss(results).items()}


MEASURE = Measure("sink_tables", measure, FLAGS)
NEEDED = above(losses("none", 0), by=SAME)  # plain softmax depends on its first tokens
CLAIMS = (
    claim("Table 3, 160M, 0/1/2/4 of 1024: 27.87/18.49/18.05/18.05",
          "With plain softmax, a model loses over 0.02 nats with none of its first tokens, and "
          "with one", "sink_tables", NEEDED, above(losses("none", 1), by=SAME)),
    claim("Table 3: 29214/19.90/18.27/18.01",
          "With a zero sink, a model still loses over 0.02 nats with none, and with one",
          "sink_tables", above(losses("zero", 0), by=SAME), above(losses("zero", 1), by=SAME),
          seen=[NEEDED]),
    claim("Table 3: 1235/18.01/18.01/18.02",
          "With a trained sink token, that token is needed and enough; plain softmax needs more",
          "sink_tables", above(losses("token", 0), by=SAME), within(losses("token", 1), by=SAME),
          above(losses("none", 1), by=SAME), seen=[NEEDED]),
    claim("Figure 6", "A sink token in training raises the loss by under 0.02 nats, over seeds",
          "sink_tables", below(raised_loss, SAME), seen=[above(paired_seeds, 1)]),
    claim("Table 4, seven tasks", "A sink token in training does not lower accuracy on tasks",
          "sink_tables", needs="models that are better than chance"),
)  # fmt: skip


def variants_table() -> str:
    """A row per variant: Table 3 as differences, means over the texts."""
    variants = read("sink_tables")["results"]["variants"].values()
    model = next(iter(variants))
    *sizes, base = (size for size in next(iter(model["perplexity"].values())) if "+" in size)
    cells = []
    for variant in variants:
        texts = variant["perplexity"].values()
        means = (np.mean([text[size]["loss_over_base"] for text in texts]) for size in sizes)
        over = [f"{round(mean, 4) + 0.0:+.4f}" for mean in means]
        kind, attention = KINDS[variant_of_record(variant)], variant["first_token"]["most"]
        cells.append((kind, f"{variant['valid_loss']:.3f}", *over, f"{attention:.3f}"))
    heads = ("trained with", "validation loss", *sizes, "largest attention of a head")
    caption = (
        f"{model['weights'] / 1e6:.1f} million weights, {model['tokens'] / 1e6:.1f} million tokens "
        f"of training. `s+w`: loss minus that of {base}. Attention: on the first token."
    )
    return table(heads, cells, caption)


TABLES = {"sink_tables": variants_table}
STATEMENTS = (
    Statement("docs/results/training.md", "None of them needs its first tokens", "sink_tables",
              [within(losses(kind, count), by=0.001)
               for kind in ("none", "zero", "token") for count in SINKS]),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
