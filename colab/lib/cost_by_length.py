"""Cost by text length: the time of one more token, and the bytes of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.evals.lib import timing
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import styles


class Cost(NamedTuple):
    """What one token costs after `tokens` others; microseconds: median of the rounds."""

    tokens: int
    microseconds: float
    state_bytes: int


def measure(
    llm: Llm,
    ids: Sequence[int],
    policies: Sequence[str],
    lengths: Sequence[int],
    new: int = 64,
    count: int = 3,
) -> dict[str, list[Cost]]:
    """The costs under each policy after each length of a text; the variants alternate.

    new: tokens generated per measurement; count: rounds.
    """
    streams, variants = {}, {}
    for policy in policies:
        for length in lengths:
            stream = models.Stream(llm, policy, tokens=length + new)
            stream.prefill([ids[:length]])
            stream.finish_prefill()
            streams[policy, length] = stream
            variants[f"{policy} {length}"] = timing.decode_variant(stream, new)
    seconds = timing.time_rounds(variants, count, "time of a token")
    return {
        policy: [
            Cost(
                length,
                float(np.median(seconds[f"{policy} {length}"])) / new * 1e6,
                streams[policy, length].state_bytes,
            )
            for length in lengths
        ]
        for policy in policies
    }


def draw(by_policy: dict[str, list[Cost]], caption: str) -> runtime.Picture:
    """Time and memory by the length of the text."""
    figure, (time_axes, memory_axes) = pictures.begin(7.5, 3.4, columns=2)
    for (policy, costs), look in zip(by_policy.items(), styles(list(by_policy)), strict=True):
        lengths, line = [cost.tokens for cost in costs], {"marker": "o", "ms": 3, **look}
        time_axes.plot(lengths, [cost.microseconds for cost in costs], label=policy, **line)
        memory_axes.plot(lengths, [cost.state_bytes / 2**20 for cost in costs], **line)
    time_axes.set(ylabel="time of the next token (µs)")
    memory_axes.set(ylabel="memory of the cache (MiB)")
    for axes in (time_axes, memory_axes):
        axes.set(xlabel="tokens before it", ylim=(0, None))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    pictures.legend(figure, 2)
    return runtime.picture(figure, caption)
