"""Small models with and without a sink, trained on the spot: how they learn, attend and lose
tokens.

The stream is that of evals/training/backcopy.py: letters of a Markov chain, and triggers. After a
trigger the letter before it comes again. A head that copies is idle at all other letters. The
drawing functions take one dictionary of variants per seed.
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
from jaxkv.models import pictures, uncached
from jaxkv.models.data import Tokens
from jaxkv.models.llm import Llm
from jaxkv.models.palette import VARIANTS
from jaxkv.models.pretrain import pretrain
from jaxkv.typing import Float32, Int32

RUNS = 1_000  # samples of held-out letters
STRETCHES = 200  # of them, one of which is drawn
ALIKE = 2  # from this place of a sample on all variants have seen the letters that matter


def train(
    variants: Sequence[str], steps: int, seed: int, folder: Path
) -> tuple[dict[str, Llm], Tokens]:
    """A model of each variant (`none`, `token`, `logit`, ...), and the letters they learnt from.

    folder: keeps data and runs; seeds may share one.
    """
    tokens = backcopy.write(backcopy.Chain(0), folder / "data")
    found = {}
    for variant in variants:
        recipe = dataclasses.replace(backcopy.recipe_of(variant, seed), steps=steps)
        out = folder / f"{variant}-{seed}"
        found[variant] = models.load(pretrain(recipe, tokens, out, tell=lambda line: None))
        print(f"{variant}, seed {seed}: {steps} steps in {logged(out)[-1]['seconds']:.0f} s")
    return found, tokens


def held_back(variant: Llm, tokens: Tokens, count: int, start: int = 0) -> list[int]:
    """Letters that no model has seen, with what this one expects in front of a text."""
    return [*variant.tokenizer.front, *tokens.run("valid", start, count).tolist()]


def maps(
    variant: Llm, ids: Int32[np.ndarray, "B T"] | Sequence[Sequence[int]]
) -> Float32[np.ndarray, "B T S"]:
    """What each token of some texts looks at, in a model of one layer and head."""
    inputs = jnp.asarray(ids, jnp.int32)
    _, _, seen = uncached.forward(
        variant.config, variant.weights, inputs, uncached.attend_with_probabilities
    )
    return np.asarray(seen[0][:, 0])


def most_idle(variant: Llm, tokens: Tokens, count: int) -> int:
    """Where the stretch of this many held-out letters begins, of `STRETCHES`, that looks most at
    its first token."""
    starts = [number * count for number in range(STRETCHES)]
    ids = [held_back(variant, tokens, count, start) for start in starts]
    return starts[int(maps(variant, ids)[:, :, 0].mean(axis=1).argmax())]


def looks(variant: Llm, tokens: Tokens) -> tuple[float, float]:
    """Mean attention that triggers give the letter before them, and that all other letters give
    themselves and the sink token, if there is one."""
    context, front = variant.config.context, variant.tokenizer.front
    ids = tokens.run("valid", 0, 100 * context).reshape(100, context).astype(np.int32)
    ids[:, : len(front)] = front
    seen = maps(variant, ids)
    back, own = (np.diagonal(seen, offset, 1, 2) for offset in (-1, 0))
    idle = own + seen[:, :, 0] * len(front)
    begin = 1 + len(front)  # in front of it there is a letter to copy
    trigger = np.isin(ids, backcopy.Chain(0).triggers)[:, begin:]
    return float(back[:, begin - 1 :][trigger].mean()), float(idle[:, begin:][~trigger].mean())


def share_of_first(variant: Llm, tokens: Tokens) -> Float32[np.ndarray, " V"]:
    """Mean attention on the first token of each letter that copies nothing, in the second half of a
    sample; those who give most come first."""
    chain, context = backcopy.Chain(0), variant.config.context
    ids = tokens.run("valid", 0, 100 * context).tolist()
    return np.sort(backcopy.dormant(variant, chain, ids, context // 2))[::-1]


def loss_by_place(variant: Llm, tokens: Tokens) -> Float32[np.ndarray, " T"]:
    """The mean loss of held-out letters by their place in a sample, in nats a letter.

    A sink token has the place of a sample's first letter, which the model then has not seen: the
    letter after it is predicted from nothing, and the next one, if that was a trigger, too.
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
    """The mean loss of a long text under each cache, in nats a letter; caches: policies by name."""
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
    """`loss_by_place` with the least there can be, and `share_of_first`; a line for each seed."""
    figure, (left, right) = pictures.begin(6.6, 3.4, columns=2)
    for axes, seeds in ((left, places), (right, shares)):
        for number, found in enumerate(seeds):
            for name, line in found.items():
                label = name if axes is left and not number else None
                axes.plot(np.arange(len(line)) + 1, line, color=VARIANTS[name], lw=1.2, label=label)
    left.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="the least there can be")
    left.set(xlabel="place in a sample", ylabel="loss (nats a letter)", ylim=(floor - 0.2, None))
    right.set(xlabel="letters that copy nothing, sorted", ylabel="attention on the first token",
              ylim=(0, 1))  # fmt: skip
    pictures.legend(figure, 3)
    return runtime.picture(figure, "held-back letters, a line for each seed")


def draw_maps(
    variants: Mapping[str, Llm], tokens: Tokens, letters: int, start: int
) -> runtime.Picture:
    """What each letter of a short text looks at, by variant; triggers have a dot."""
    figure, all_axes = pictures.begin(3.3 * len(variants), 3.9, columns=len(variants))
    triggers = set(backcopy.Chain(0).triggers.tolist())
    for axes, (name, variant) in zip(np.ravel(all_axes), variants.items(), strict=True):
        ids = held_back(variant, tokens, letters, start)
        front = len(variant.tokenizer.front)
        (seen,) = maps(variant, [ids])
        hidden = np.triu(np.ones(seen.shape, bool), 1)
        image = axes.imshow(np.ma.masked_where(hidden, seen), vmin=0, vmax=1, cmap="viridis")
        reported = [backcopy.LETTERS[i] + "." * (i in triggers) for i in ids[front:]]
        reported = [*["sink"] * front, *reported]
        axes.set_xticks(range(len(ids)), reported, fontsize=8)
        axes.set_yticks(range(len(ids)), reported, fontsize=8)
        for label in axes.get_xticklabels()[:front]:
            label.set_rotation(90)
        axes.tick_params(length=0)
        axes.set(title=name, xlabel="looks at this letter", ylabel="a letter")
        axes.grid(False)
    figure.colorbar(image, ax=list(np.ravel(all_axes)), orientation="horizontal", shrink=0.6,
                    aspect=30, label="attention")  # fmt: skip
    return runtime.picture(figure, f"{letters} held-back letters", colours=256)


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Losses by model (rows) and cache (columns)."""
    caches = list(next(iter(found.values())))
    width = max(map(len, found)) + 2
    lines = [" " * width + "  ".join(caches)]
    lines += [
        variant.ljust(width) + "  ".join(f"{loss[cache]:.3f}".rjust(len(cache)) for cache in caches)
        for variant, loss in found.items()
    ]
    return "\n".join(lines)


def draw_losses(
    found: Sequence[Mapping[str, Mapping[str, float]]], floor: float
) -> runtime.Picture:
    """Losses by variant and cache as points, one for each seed."""
    figure, axes = pictures.begin(6.0, 3.2)
    for seed, variants in enumerate(found):
        for number, (variant, loss) in enumerate(variants.items()):
            at = np.arange(len(loss)) + 0.16 * (number - (len(variants) - 1) / 2)
            label = None if seed else variant
            axes.plot(at, list(loss.values()), "o", ms=5, color=VARIANTS[variant], label=label)
    caches = list(next(iter(found[0].values())))
    axes.axhline(floor, color=pictures.INK, lw=0.8, ls="--", label="the least there can be")
    axes.set_xticks(range(len(caches)), caches)
    axes.set(xlabel="first + newest tokens in the cache", ylabel="loss (nats a letter)",
             ylim=(floor - 0.1, None))  # fmt: skip
    pictures.legend(figure, 3)
    return runtime.picture(figure, "held-back letters, a point for each seed")
