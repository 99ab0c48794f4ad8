"""Tokens that each policy caches of a text: which ones, in how many heads, with which weight."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.models.tools import pictures
from jaxkv.models.tools.view import weights_of_layer
from jaxkv.state.memory import show
from jaxkv.typing import Float32, Int32

SHADES = 8  # background shades of a token
MAX_WEIGHT = 4.0  # from this weight on, a shade is the darkest


class Coverage(NamedTuple):
    """Weight of each token of the text by layer and KV head, 0 where it is not cached."""

    weights: Float32[np.ndarray, "L K T"]
    state_bytes: int

    @property
    def mean(self) -> Float32[np.ndarray, " T"]:
        """Over all layers and kv heads."""
        return self.weights.mean(axis=(0, 1))

    @property
    def counts(self) -> Int32[np.ndarray, "L K"]:
        """Number of cached tokens by layer and KV head."""
        return (self.weights > 0).sum(axis=2, dtype=np.int32)

    def share(self, place: slice) -> float:
        """Fraction of the heads that cache the tokens of a place."""
        return float(np.mean(self.weights[:, :, place] > 0))


def measure_coverage(
    llm: Llm, ids: Sequence[int], settings: Mapping[str, str]
) -> dict[str, Coverage]:
    """The tokens that each policy caches at the end of prefill."""
    coverages = {}
    for name, setting in settings.items():
        stream = models.Stream(llm, setting, tokens=len(ids))
        stream.prefill([ids])
        stream.finish_prefill()
        layers = [
            weights_of_layer(*policy.cached(llm.spec, state), len(ids))
            for policy, state in zip(stream.policies, stream.decoding.states, strict=True)
        ]
        coverages[name] = Coverage(np.stack(layers), stream.state_bytes)
    return coverages


def draw_strips(coverages: Mapping[str, Coverage]) -> runtime.Picture:
    """One strip per policy, the text from left to right."""
    figure, axes = pictures.begin(6.5, 0.9 + 0.3 * len(coverages))
    means = np.stack([coverage.mean for coverage in coverages.values()])
    image = axes.imshow(
        means, aspect="auto", cmap="Blues", vmin=0, vmax=MAX_WEIGHT, interpolation="nearest"
    )
    axes.set_yticks(range(len(coverages)), coverages, fontsize=9)
    axes.set_yticks(np.arange(len(coverages) - 1) + 0.5, minor=True)
    axes.grid(False)
    axes.grid(axis="y", which="minor", color="white", lw=3)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="position in the text (tokens)")
    figure.colorbar(image, ax=axes, label="weight", extend="max", ticks=range(int(MAX_WEIGHT) + 1))
    layers, heads, tokens = next(iter(coverages.values())).weights.shape
    caption = f"{tokens} tokens of a novel; mean weight over {layers} layers of {heads} KV heads"
    return runtime.picture(figure, caption, colours=256)


def find_tokens(llm: Llm, ids: Sequence[int], words: str) -> slice | None:
    """The tokens of the first occurrence of a phrase, or None.

    Ignores spaces and case, because some tokenizers change them.
    """
    pieces = Pieces(llm.tokenizer)
    letters = [
        (letter, number)
        for number, token in enumerate(ids)
        for letter in pieces.push(token).casefold()
        if not letter.isspace()
    ]
    phrase = "".join(words.split()).casefold()
    begin = "".join(letter for letter, _ in letters).find(phrase)
    if begin < 0:
        return None
    return slice(letters[begin][1], letters[begin + len(phrase) - 1][1] + 1)


def locate_phrases(llm: Llm, ids: Sequence[int], words: Mapping[str, str]) -> dict[str, slice]:
    """The tokens of each phrase; a phrase that does not occur is printed and left out."""
    places = {name: find_tokens(llm, ids, phrase) for name, phrase in words.items()}
    for name, place in places.items():
        if place is None:
            print(f"{name}: not among the first {len(ids)} tokens of this model")
    return {name: place for name, place in places.items() if place is not None}


def size_table(coverages: Mapping[str, Coverage], settings: Mapping[str, str]) -> runtime.TextBox:
    """By policy: cached tokens per KV head, bytes, and the policy string."""
    lines = [f"{'tokens per KV head:':16}{'mean':>6}{'least':>7}{'most':>6}{'bytes':>12}  setting"]
    for name, coverage in coverages.items():
        per_head, size = coverage.counts, show(coverage.state_bytes)
        counts = f"{per_head.mean():10.0f}{per_head.min():7}{per_head.max():6}"
        lines.append(f"{name:16}{counts}{size:>12}  {settings[name]}")
    return runtime.TextBox("\n".join(lines))


def share_table(coverages: Mapping[str, Coverage], places: Mapping[str, slice]) -> runtime.TextBox:
    """By policy: the fraction of heads that cache the tokens of each place, and bytes."""
    lines = [f"{'':16}" + "".join(f"{name:>22}" for name in places) + f"{'bytes':>12}"]
    for name, coverage in coverages.items():
        cells = "".join(f"{coverage.share(place):22.0%}" for place in places.values())
        lines.append(f"{name:16}{cells}{show(coverage.state_bytes):>12}")
    return runtime.TextBox("\n".join(lines))


def highlight(
    llm: Llm, ids: Sequence[int], coverages: Mapping[str, Coverage], names: Sequence[str]
) -> runtime.Page:
    """A text once per policy, each token on a background as dark as its weight.

    ids: the first tokens of the text that was read.
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
        weights = np.minimum(coverages[name].mean[: len(ids)], MAX_WEIGHT) / MAX_WEIGHT
        # The square root, because most cached tokens have weight 1 of 4.
        shades = np.ceil(SHADES * np.sqrt(weights) - 1e-6).astype(int)
        text = "".join(
            f"<i class=s{dark}>{word}</i>" if dark else word
            for word, dark in zip(words, shades, strict=True)
        )
        parts.append(f"<div class=kept><h4>{html.escape(name)}</h4>{text}</div>")
    return runtime.Page("".join(parts))
