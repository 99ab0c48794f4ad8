"""What each cache holds of a text: which tokens, in how many of its heads, with what weight."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.models import pictures
from jaxkv.models.llm import Llm
from jaxkv.models.tokenizer import Pieces
from jaxkv.state.memory import show
from jaxkv.typing import Float32, Int32

SHADES = 8  # of a token's background
MOST = 4.0  # weight from which a shade is the darkest


class Coverage(NamedTuple):
    """weights: of each token of the text by layer and kv head, 0 where it is not held."""

    weights: Float32[np.ndarray, "L K T"]
    state_bytes: int

    @property
    def mean(self) -> Float32[np.ndarray, " T"]:
        """Over all layers and kv heads."""
        return self.weights.mean(axis=(0, 1))

    @property
    def counts(self) -> Int32[np.ndarray, "L K"]:
        """How many tokens each kv head holds."""
        return (self.weights > 0).sum(axis=2, dtype=np.int32)

    def share(self, place: slice) -> float:
        """In how many of the heads the tokens of a place are cached, of all."""
        return float(np.mean(self.weights[:, :, place] > 0))


def read(llm: Llm, ids: Sequence[int], settings: Mapping[str, str]) -> dict[str, Coverage]:
    """What caches hold once they have read a text, and finished prefill."""
    found = {}
    for name, setting in settings.items():
        stream = models.Stream(llm, setting, tokens=len(ids))
        stream.prefill([ids])
        stream.finish_prefill()
        layers = [
            of_layer(*policy.cached(llm.spec, state), len(ids))
            for policy, state in zip(stream.policies, stream.decoding.states, strict=True)
        ]
        found[name] = Coverage(np.stack(layers), stream.state_bytes)
    return found


def of_layer(positions: np.ndarray, log_weight: np.ndarray, tokens: int) -> np.ndarray:
    """Weights [K,T] of a layer's only row; a token in two slots has the sum of theirs."""
    positions, weight = np.asarray(positions)[0], np.exp(np.asarray(log_weight)[0])
    made = np.zeros((len(weight), tokens), np.float32)
    heads = np.arange(len(weight))[:, None]
    held = weight > 0
    np.add.at(made, (heads, np.where(held, positions, 0)), np.where(held, weight, 0))
    return made


def draw(found: Mapping[str, Coverage]) -> runtime.Picture:
    """A strip for each cache, the text from left to right."""
    figure, axes = pictures.begin(6.5, 0.9 + 0.3 * len(found))
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
    layers, heads, tokens = next(iter(found.values())).weights.shape
    caption = f"{tokens} tokens of a novel; mean weight over {layers} layers of {heads} kv heads"
    return runtime.picture(figure, caption, colours=256)


def find(llm: Llm, ids: Sequence[int], words: str) -> slice | None:
    """The tokens of the first place where a text has these words, or None.

    Spaces and capitals count for nothing: some tokenizers change them.
    """
    pieces = Pieces(llm.tokenizer)
    letters = [
        (letter, number)
        for number, token in enumerate(ids)
        for letter in pieces.push(token).casefold()
        if not letter.isspace()
    ]
    wanted = "".join(words.split()).casefold()
    begin = "".join(letter for letter, _ in letters).find(wanted)
    if begin < 0:
        return None
    return slice(letters[begin][1], letters[begin + len(wanted) - 1][1] + 1)


def places(llm: Llm, ids: Sequence[int], words: Mapping[str, str]) -> dict[str, slice]:
    """Where a text has each of some words; those that it has not are named and left out."""
    found = {name: find(llm, ids, some) for name, some in words.items()}
    for name, place in found.items():
        if place is None:
            print(f"{name}: not among the first {len(ids)} tokens of this model")
    return {name: place for name, place in found.items() if place is not None}


def sizes(found: Mapping[str, Coverage], settings: Mapping[str, str]) -> runtime.Text:
    """How many tokens a kv head holds in each cache, its bytes, and how it was set."""
    lines = [f"{'tokens of a kv head:':16}{'mean':>6}{'least':>7}{'most':>6}{'bytes':>12}  setting"]
    for name, held in found.items():
        held_by = f"{held.counts.mean():10.0f}{held.counts.min():7}{held.counts.max():6}"
        lines.append(f"{name:16}{held_by}{show(held.state_bytes):>12}  {settings[name]}")
    return runtime.Text("\n".join(lines))


def shares(found: Mapping[str, Coverage], places: Mapping[str, slice]) -> runtime.Text:
    """The fraction of heads that cache the tokens of some places, and the bytes of each cache."""
    lines = [f"{'':16}" + "".join(f"{name:>22}" for name in places) + f"{'bytes':>12}"]
    for name, held in found.items():
        cells = "".join(f"{held.share(place):22.0%}" for place in places.values())
        lines.append(f"{name:16}{cells}{show(held.state_bytes):>12}")
    return runtime.Text("\n".join(lines))


def shade(
    llm: Llm, ids: Sequence[int], found: Mapping[str, Coverage], names: Sequence[str]
) -> runtime.Page:
    """A text, or its beginning, once for each cache, every token on a ground as dark as its weight.

    ids: as many of its first tokens as are shown.
    """
    pieces = Pieces(llm.tokenizer)
    words = [html.escape(pieces.push(token)).replace("\n", "<br>") for token in ids]
    rules = "".join(
        f".kept i.s{n}{{background:rgba(0,114,178,{0.75 * n / SHADES:.2f})}}"
        for n in range(1, SHADES + 1)
    )
    parts = [f"<style>.kept i{{font-style:normal}}.kept{{line-height:1.5;max-width:60em}}{rules}"
             "</style>"]  # fmt: skip
    for name in names:
        weights = np.minimum(found[name].mean[: len(ids)], MOST) / MOST
        # The square root, for most that is cached has the weight 1 of 4.
        shades = np.ceil(SHADES * np.sqrt(weights) - 1e-6).astype(int)
        text = "".join(
            f"<i class=s{dark}>{word}</i>" if dark else word
            for word, dark in zip(words, shades, strict=True)
        )
        parts.append(f"<div class=kept><h4>{html.escape(name)}</h4>{text}</div>")
    return runtime.Page("".join(parts))
