"""Small models with and without a sink, trained in the notebook: loss and attention.

The data are the stream of evals/training/backcopy.py: letters of a Markov chain, and triggers. The
letter after a trigger copies the letter before it. A copying head is idle at all other letters. The
plotting functions take one dictionary of variants per seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.evals.training import backcopy
from jaxkv.evals.training.sink_tables import logged
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import VARIANTS
from jaxkv.models.training.data import DataFolder
from jaxkv.models.training.pretrain import pretrain
from jaxkv.typing import Float32, Int32

RUNS = 1_000  # samples of held-out letters
STRETCHES = 200  # candidates for the attention maps, of which one is drawn
COMPARABLE_FROM = 2  # from this position on, every variant has seen the letters it needs


def train(
    variants: Sequence[str], steps: int, seed: int, folder: Path
) -> tuple[dict[str, Llm], DataFolder]:
    """A model of each variant (`none`, `token`, `logit`, ...), and their training letters.

    folder: for data and runs; seeds may share one.
    """
    tokens = backcopy.write(backcopy.LetterChain(0), folder / "data")
    trained = {}
    for variant in variants:
        recipe = dataclasses.replace(backcopy.recipe_of(variant, seed), steps=steps)
        out = folder / f"{variant}-{seed}"
        trained[variant] = models.load(pretrain(recipe, tokens, out, tell=lambda line: None))
        print(f"{variant}, seed {seed}: {steps} steps in {logged(out)[-1]['seconds']:.0f} s")
    return trained, tokens


def held_out(variant: Llm, tokens: DataFolder, count: int, start: int = 0) -> list[int]:
    """Held-out letters, after the front tokens that this model expects."""
    return [*variant.tokenizer.front, *tokens.run("valid", start, count).tolist()]


def attention_maps(
    variant: Llm, ids: Int32[np.ndarray, "B T"] | Sequence[Sequence[int]]
) -> Float32[np.ndarray, "B T S"]:
    """Attention probabilities of a model with one layer and one head."""
    inputs = jnp.asarray(ids, jnp.int32)
    _, _, seen = uncached.forward(
        variant.config, variant.weights, inputs, uncached.attend_with_probabilities
    )
    return np.asarray(seen[0][:, 0])


def find_idle_stretch(variant: Llm, tokens: DataFolder, count: int) -> int:
    """Start of the held-out stretch, of `STRETCHES`, that attends most to its first token."""
    starts = [number * count for number in range(STRETCHES)]
    ids = [held_out(variant, tokens, count, start) for start in starts]
    return starts[int(attention_maps(variant, ids)[:, :, 0].mean(axis=1).argmax())]


def mean_attention(variant: Llm, tokens: DataFolder) -> tuple[float, float]:
    """Mean attention of triggers to the letter before them, and of all other letters to themselves
    and the sink token, if there is one."""
    context, front = variant.config.context, variant.tokenizer.front
    ids = tokens.run("valid", 0, 100 * context).reshape(100, context).astype(np.int32)
    ids[:, : len(front)] = front
    seen = attention_maps(variant, ids)
    back, diagonal = (np.diagonal(seen, offset, 1, 2) for offset in (-1, 0))
    idle = diagonal + seen[:, :, 0] * len(front)
    begin = 1 + len(front)  # the first position with a letter before it
    trigger = np.isin(ids, backcopy.LetterChain(0).triggers)[:, begin:]
    return float(back[:, begin - 1 :][trigger].mean()), float(idle[:, begin:][~trigger].mean())


def first_token_attention(variant: Llm, tokens: DataFolder) -> Float32[np.ndarray, " V"]:
    """Mean attention of each idle letter to the first token, in the second half of a sample, in
    descending order."""
    chain, context = backcopy.LetterChain(0), variant.config.context
    ids = tokens.run("valid", 0, 100 * context).tolist()
    return np.sort(backcopy.dormant(variant, chain, ids, context // 2))[::-1]


def loss_by_position(variant: Llm, tokens: DataFolder) -> Float32[np.ndarray, " T"]:
    """The mean loss of held-out letters by position in a sample, in nats per letter.

    A sink token replaces the first letter of a sample. So the next letter is predicted without
    context, and if that one is a trigger, so is the letter after it.
    """
    context, front = variant.config.context, variant.tokenizer.front
    runs = tokens.run("valid", 0, RUNS * (context + 1)).reshape(RUNS, context + 1)
    inputs, targets = runs[:, :-1].astype(np.int32), jnp.asarray(runs[:, 1:], jnp.int32)
    inputs[:, : len(front)] = front
    decoder, hidden, _ = uncached.forward(variant.config, variant.weights, jnp.asarray(inputs))
    logits = decoder.logits(hidden)  # [V,B,T]
    picked = jnp.take_along_axis(logits, targets[None], axis=0)[0]
    return np.asarray(jnp.mean(jax.nn.logsumexp(logits, axis=0) - picked, axis=0))


def losses(variant: Llm, ids: Sequence[int], caches: Mapping[str, str]) -> dict[str, float]:
    """The mean loss of a long text under each policy, in nats per letter; caches: policy strings
    by name."""
    front = len(variant.tokenizer.front)
    return {
        name: float(np.concatenate(list(models.losses(variant, ids, policy)))[front:].mean())
        for name, policy in caches.items()
    }


def draw_learning(
    places: Sequence[Mapping[str, Float32[np.ndarray, " T"]]],
    shares: Sequence[Mapping[str, Float32[np.ndarray, " V"]]],
    floor: float,
) -> runtime.Picture:
    """`loss_by_position` with its lower bound, and `first_token_attention`; one line per seed."""
    figure, (loss_axes, sink_axes) = pictures.begin(6.6, 3.4, columns=2)
    for axes, seeds in ((loss_axes, places), (sink_axes, shares)):
        for number, curves in enumerate(seeds):
            for name, line in curves.items():
                label = name if axes is loss_axes and not number else None
                axes.plot(np.arange(len(line)) + 1, line, color=VARIANTS[name], lw=1.2, label=label)
    loss_axes.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="lower bound")
    loss_axes.set(
        xlabel="position in a sample", ylabel="loss (nats per letter)", ylim=(floor - 0.2, None)
    )
    sink_axes.set(xlabel="idle letters, sorted", ylabel="attention on the first token",
              ylim=(0, 1))  # fmt: skip
    pictures.legend(figure, 3)
    return runtime.picture(figure, "held-out letters, one line per seed")


def draw_maps(
    variants: Mapping[str, Llm], tokens: DataFolder, letters: int, start: int
) -> runtime.Picture:
    """Attention maps of a short text, by variant; triggers have a dot."""
    figure, all_axes = pictures.begin(3.3 * len(variants), 3.9, columns=len(variants))
    triggers = set(backcopy.LetterChain(0).triggers.tolist())
    for axes, (name, variant) in zip(np.ravel(all_axes), variants.items(), strict=True):
        ids = held_out(variant, tokens, letters, start)
        front = len(variant.tokenizer.front)
        (seen,) = attention_maps(variant, [ids])
        hidden = np.triu(np.ones(seen.shape, bool), 1)
        image = axes.imshow(np.ma.masked_where(hidden, seen), vmin=0, vmax=1, cmap="viridis")
        reported = [backcopy.LETTERS[i] + "." * (i in triggers) for i in ids[front:]]
        reported = [*["sink"] * front, *reported]
        axes.set_xticks(range(len(ids)), reported, fontsize=8)
        axes.set_yticks(range(len(ids)), reported, fontsize=8)
        for label in axes.get_xticklabels()[:front]:
            label.set_rotation(90)
        axes.tick_params(length=0)
        axes.set(title=name, xlabel="key", ylabel="query")
        axes.grid(False)
    figure.colorbar(image, ax=list(np.ravel(all_axes)), orientation="horizontal", shrink=0.6,
                    aspect=30, label="attention")  # fmt: skip
    return runtime.picture(figure, f"{letters} held-out letters", colours=256)


def loss_table(by_variant: Mapping[str, Mapping[str, float]]) -> str:
    """Losses by model (rows) and cache (columns)."""
    caches = list(next(iter(by_variant.values())))
    width = max(map(len, by_variant)) + 2
    lines = [" " * width + "  ".join(caches)]
    lines += [
        variant.ljust(width) + "  ".join(f"{loss[cache]:.3f}".rjust(len(cache)) for cache in caches)
        for variant, loss in by_variant.items()
    ]
    return "\n".join(lines)


def draw_losses(
    by_seed: Sequence[Mapping[str, Mapping[str, float]]], floor: float
) -> runtime.Picture:
    """Losses by variant and cache, one point per seed."""
    figure, axes = pictures.begin(6.0, 3.2)
    for seed, variants in enumerate(by_seed):
        for number, (variant, loss) in enumerate(variants.items()):
            at = np.arange(len(loss)) + 0.16 * (number - (len(variants) - 1) / 2)
            label = None if seed else variant
            axes.plot(at, list(loss.values()), "o", ms=5, color=VARIANTS[variant], label=label)
    caches = list(next(iter(by_seed[0].values())))
    axes.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="lower bound")
    axes.set_xticks(range(len(caches)), caches)
    axes.set(xlabel="first + newest tokens in the cache", ylabel="loss (nats per letter)",
             ylim=(floor - 0.1, None))  # fmt: skip
    pictures.legend(figure, 3)
    return runtime.picture(figure, "held-out letters, one point per seed")
