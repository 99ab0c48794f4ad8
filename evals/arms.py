"""Small models with and without a sink, trained on the spot: how they learn, look and forget.

The stream is that of evals/backcopy.py: letters of a Markov chain, and triggers behind which the
letter before comes again. A head that copies has nothing to do at all other letters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import models
from evals import backcopy, runtime
from evals.palette import ARMS
from evals.sink_tables import logged
from jaxkv.typing import Float32
from models import uncached
from models.data import Tokens
from models.llm import Llm
from models.pretrain import pretrain


class Arm(NamedTuple):
    """One trained model. log: a line for each step that was logged; seconds: of training."""

    llm: Llm
    log: list[dict[str, Any]]
    seconds: float


def train(
    arms: Sequence[str], steps: int, seed: int, folder: Path
) -> tuple[dict[str, Arm], Tokens]:
    """A model of each arm (`none`, `token`, `logit`, ...), and the letters they learnt from."""
    tokens = backcopy.write(backcopy.Chain(0), folder / "data")
    found = {}
    for arm in arms:
        recipe = dataclasses.replace(backcopy.recipe_of(arm, seed), steps=steps)
        out = folder / arm
        llm = models.load(pretrain(recipe, tokens, out, tell=lambda line: None))
        log = logged(out)
        found[arm] = Arm(llm, log, log[-1]["seconds"])
        print(f"{arm}: {steps} steps in {found[arm].seconds:.0f} s")
    return found, tokens


def held_back(arm: Arm, tokens: Tokens, count: int) -> list[int]:
    """Letters that no model has seen, with what this one expects in front of a text."""
    return [*arm.llm.tokenizer.front, *tokens.run("valid", 0, count).tolist()]


def attention(arm: Arm, ids: Sequence[int]) -> Float32[np.ndarray, "T S"]:
    """What each token of a text looks at, in a model of one layer and head."""
    inputs = jnp.asarray([ids], jnp.int32)
    _, _, seen = uncached.forward(arm.llm.config, arm.llm.weights, inputs, uncached.look)
    return np.asarray(seen[0][0, 0])


def share_of_first(arm: Arm, tokens: Tokens) -> Float32[np.ndarray, " V"]:
    """Mean attention on the first token of each letter that copies nothing, in the second half of a
    sample; those who give most come first."""
    chain, context = backcopy.Chain(0), arm.llm.config.context
    ids = tokens.run("valid", 0, 100 * context).tolist()
    return np.sort(backcopy.dormant(arm.llm, chain, ids, context // 2))[::-1]


def losses(arm: Arm, ids: Sequence[int], policies: Sequence[str]) -> dict[str, float]:
    """The mean loss of a long text under each cache, in nats a letter."""
    front = len(arm.llm.tokenizer.front)
    return {
        policy: float(np.concatenate(list(models.losses(arm.llm, ids, policy)))[front:].mean())
        for policy in policies
    }


def draw_learning(
    arms: dict[str, Arm], floor: float, shares: dict[str, Float32[np.ndarray, " V"]]
) -> runtime.Picture:
    """The loss of held-back letters by step with the least there can be, and `share_of_first`."""
    figure, (left, right) = runtime.axes(7.5, 3.2, columns=2)
    for name, arm in arms.items():
        lines = [line for line in arm.log if "valid_loss" in line and "first_token" in line]
        steps = [line["step"] for line in lines]
        left.plot(steps, [line["valid_loss"] for line in lines], color=ARMS[name], label=name)
        right.plot(np.arange(len(shares[name])) + 1, shares[name], color=ARMS[name])
    left.axhline(floor, color="#404040", lw=0.8, ls="--", label="the least there can be")
    left.set(xlabel="steps of training", ylabel="loss (nats a letter)")
    right.set(xlabel="letters that copy nothing, sorted", ylabel="attention on the first token",
              ylim=(0, 1))  # fmt: skip
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=3)
    return runtime.picture(figure, "held-back letters; models of one layer and head")


def draw_maps(arms: dict[str, Arm], tokens: Tokens, letters: int) -> runtime.Picture:
    """What each letter of a short text looks at, by arm."""
    figure, all_axes = runtime.axes(3.7 * len(arms) + 0.4, 4.0, columns=len(arms))
    for axes, (name, arm) in zip(np.ravel(all_axes), arms.items(), strict=True):
        ids = held_back(arm, tokens, letters)
        front = len(arm.llm.tokenizer.front)
        seen = attention(arm, ids)
        hidden = np.triu(np.ones(seen.shape, bool), 1)
        image = axes.imshow(np.ma.masked_where(hidden, seen), vmin=0, vmax=1, cmap="viridis")
        told = ["sink"] * front + [backcopy.LETTERS[i] for i in ids[front:]]
        axes.set_xticks(range(len(told)), told, fontsize=6, rotation=90 if front else 0)
        axes.set_yticks(range(len(told)), told, fontsize=6)
        axes.set(title=name, xlabel="looks at this letter", ylabel="a letter")
        axes.grid(False)
    figure.colorbar(image, ax=list(np.ravel(all_axes)), shrink=0.6, label="attention")
    return runtime.picture(figure, f"attention of {letters} held-back letters")


def table(found: dict[str, dict[str, float]]) -> str:
    """Losses by arm (rows) and cache (columns)."""
    caches = list(next(iter(found.values())))
    width = max(map(len, found)) + 2
    lines = [" " * width + "  ".join(caches)]
    lines += [
        arm.ljust(width) + "  ".join(f"{loss[cache]:.3f}".rjust(len(cache)) for cache in caches)
        for arm, loss in found.items()
    ]
    return "\n".join(lines)


def draw_losses(found: dict[str, dict[str, float]], floor: float) -> runtime.Picture:
    """The same as points."""
    figure, axes = runtime.axes(7.0, 3.2)
    caches = list(next(iter(found.values())))
    for number, (arm, loss) in enumerate(found.items()):
        at = np.arange(len(caches)) + 0.1 * (number - (len(found) - 1) / 2)
        axes.plot(at, [loss[cache] for cache in caches], "o", color=ARMS[arm], label=arm)
    axes.axhline(floor, color="#404040", lw=0.8, ls="--", label="the least there can be")
    axes.set_xticks(range(len(caches)), caches, fontsize=8)
    axes.set(ylabel="loss (nats a letter)", xlabel="cache of 24 letters", ylim=(floor - 0.1, None))
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=3)
    return runtime.picture(figure, "held-back letters, far beyond the trained context of 48")
