"""What each cache holds of a text: which tokens, in how many of its heads, with what weight."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import models
from evals import runtime
from jaxkv.memory import show
from jaxkv.typing import Float32
from models.llm import Llm
from models.tokenizer import Pieces

SHADES = 8  # of a token's background
MOST = 4.0  # weight from which a shade is the darkest


class Held(NamedTuple):
    """weights: of each token of the text by layer and kv head, 0 where it is not held."""

    weights: Float32[np.ndarray, "L K T"]
    state_bytes: int

    @property
    def mean(self) -> Float32[np.ndarray, " T"]:
        """Over all layers and kv heads."""
        return self.weights.mean(axis=(0, 1))


def read(llm: Llm, ids: Sequence[int], settings: Mapping[str, str]) -> dict[str, Held]:
    """What caches hold once they have read a text, and sealed it where they do that."""
    found = {}
    for name, setting in settings.items():
        stream = models.Stream(llm, setting, tokens=len(ids))
        stream.read([ids])
        stream.seal()
        layers = [
            of_layer(*policy.kept(llm.spec, state), len(ids))
            for policy, state in zip(stream.policies, stream.decoding.states, strict=True)
        ]
        found[name] = Held(np.stack(layers), stream.state_bytes)
    return found


def of_layer(positions: np.ndarray, log_weight: np.ndarray, tokens: int) -> np.ndarray:
    """Weights [K,T] of a layer's only row; a token in two slots has the sum of theirs."""
    positions, weight = np.asarray(positions)[0], np.exp(np.asarray(log_weight)[0])
    made = np.zeros((len(weight), tokens), np.float32)
    heads = np.arange(len(weight))[:, None]
    held = weight > 0
    np.add.at(made, (heads, np.where(held, positions, 0)), np.where(held, weight, 0))
    return made


def draw(found: Mapping[str, Held], caption: str) -> runtime.Picture:
    """A strip for each cache, the text from left to right."""
    figure, axes = runtime.axes(7.0, 0.7 + 0.3 * len(found))
    image = axes.imshow(
        np.stack([held.mean for held in found.values()]), aspect="auto", cmap="Blues", vmin=0,
        vmax=MOST, interpolation="nearest",
    )  # fmt: skip
    axes.set_yticks(range(len(found)), found, fontsize=9)
    axes.set_yticks(np.arange(len(found) - 1) + 0.5, minor=True)
    axes.grid(False)
    axes.grid(axis="y", which="minor", color="white", lw=3)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="position in the text (tokens)")
    figure.colorbar(image, ax=axes, label="weight", extend="max", ticks=range(int(MOST) + 1))
    return runtime.picture(figure, caption)


def find(llm: Llm, ids: Sequence[int], words: str) -> slice:
    """The tokens of the first place where a text has these words.

    Raises ValueError where it has them not.
    """
    pieces = Pieces(llm.tokenizer)
    ends = np.cumsum([len(pieces.push(token)) for token in ids])
    begin = llm.tokenizer.decode(ids).index(words)
    first, last = np.searchsorted(ends, [begin, begin + len(words) - 1], side="right")
    return slice(int(first), int(last) + 1)


def table(found: Mapping[str, Held], places: Mapping[str, slice]) -> str:
    """Of some places in how many heads they are held, and the bytes of each cache."""
    lines = [f"{'':16}" + "".join(f"{name:>18}" for name in places) + f"{'cache':>12}"]
    for name, held in found.items():
        shares = [np.mean(held.weights[:, :, place] > 0) for place in places.values()]
        cells = "".join(f"{share:18.0%}" for share in shares)
        lines.append(f"{name:16}{cells}{show(held.state_bytes):>12}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Page:
    """HTML that a notebook shows when it is the last value of a cell."""

    text: str = field(repr=False)

    def _repr_html_(self) -> str:
        return self.text


def shade(llm: Llm, ids: Sequence[int], found: Mapping[str, Held], names: Sequence[str]) -> Page:
    """The text once for each cache, every token on a ground as dark as its weight."""
    pieces = Pieces(llm.tokenizer)
    words = [html.escape(pieces.push(token)).replace("\n", "<br>") for token in ids]
    rules = "".join(
        f".kept i.s{n}{{background:rgba(0,114,178,{0.75 * n / SHADES:.2f})}}"
        for n in range(1, SHADES + 1)
    )
    parts = [f"<style>.kept i{{font-style:normal}}.kept{{line-height:1.5;max-width:60em}}{rules}"
             "</style>"]  # fmt: skip
    for name in names:
        weights = np.minimum(found[name].mean, MOST) / MOST
        # The square root, for most that is held has the weight 1 of 4.
        shades = np.ceil(SHADES * np.sqrt(weights) - 1e-6).astype(int)
        text = "".join(
            f"<i class=s{dark}>{word}</i>" if dark else word
            for word, dark in zip(words, shades, strict=True)
        )
        parts.append(f"<div class=kept><h4>{html.escape(name)}</h4>{text}</div>")
    return Page("".join(parts))
