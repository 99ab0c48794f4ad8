"""Tokens that each policy caches of a text: which ones, in how many heads, with which weight."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.models.tools.view import weights_of_layer
from jaxkv.state.memory import show
from jaxkv.typing import Float32, Int32

if TYPE_CHECKING:
    from IPython.display import HTML

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


def find_tokens(llm: Llm, ids: Sequence[int], phrase: str) -> slice | None:
    """The tokens of the first occurrence of a phrase; None where a tokenizer hides it."""
    decode = llm.tokenizer.decode
    stop = next((n for n in range(1, len(ids) + 1) if phrase in decode(ids[:n])), None)
    if stop is None:
        return None
    start = max(n for n in range(stop) if phrase in decode(ids[n:stop]))
    return slice(start, stop)


def size_table(coverages: Mapping[str, Coverage], settings: Mapping[str, str]) -> runtime.TextBox:
    """By policy: cached tokens per KV head, bytes, and the policy string."""
    lines = [f"{'tokens per KV head:':16}{'mean':>6}{'least':>7}{'most':>6}{'bytes':>12}  setting"]
    for name, coverage in coverages.items():
        per_head, size = coverage.counts, show(coverage.state_bytes)
        counts = f"{per_head.mean():10.0f}{per_head.min():7}{per_head.max():6}"
        lines.append(f"{name:16}{counts}{size:>12}  {settings[name]}")
    return runtime.TextBox("\n".join(lines))


def highlight(llm: Llm, ids: Sequence[int], coverages: Mapping[str, Coverage]) -> HTML:
    """A text once per policy, each token on a background as dark as its weight.

    ids: the first tokens of the text that was read.
    """
    from IPython.display import HTML

    pieces, parts = Pieces(llm.tokenizer), []
    words = [html.escape(pieces.push(token)).replace("\n", "<br>") for token in ids]
    for name, coverage in coverages.items():
        # The square root, because most cached tokens have weight 1 of 4.
        shades = np.sqrt(np.minimum(coverage.mean[: len(ids)] / MAX_WEIGHT, 1)).round(1)
        runs = groupby(zip(shades, words, strict=True), key=lambda pair: pair[0])
        text = "".join(
            f"<span style='background:rgba(0,114,178,{0.75 * shade:.2g})'>"
            f"{''.join(word for _, word in run)}</span>"
            for shade, run in runs
        )
        parts.append(f"<h4>{html.escape(name)}</h4><div style='line-height:1.5'>{text}</div>")
    return HTML("".join(parts))
