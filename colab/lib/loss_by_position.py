"""The loss at each position, averaged over many short texts: shows where a cache fails.

In a single long text the variation of the text would hide that position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv import models
from jaxkv.colab import runtime
from jaxkv.models import pictures
from jaxkv.models.llm import Llm
from jaxkv.models.palette import styles
from jaxkv.typing import Float32


def losses(
    llm: Llm, texts: Sequence[Sequence[int]], policies: Sequence[str]
) -> dict[str, Float32[np.ndarray, "R T"]]:
    """By policy, the loss in nats of every token but the first; one row per text.

    texts: of one length, all with the same first token.
    """
    return {
        policy: np.stack([np.concatenate(list(models.losses(llm, ids, policy))) for ids in texts])
        for policy in policies
    }


def draw(
    found: Mapping[str, Float32[np.ndarray, "R T"]], marks: Mapping[str, int], caption: str
) -> runtime.Picture:
    """The mean over texts by position, with two standard errors.

    marks: labels of positions, drawn as dashed lines.
    """
    figure, axes = pictures.begin()
    for (policy, each), look in zip(found.items(), styles(list(found)), strict=True):
        at, mean = np.arange(1, each.shape[1] + 1), each.mean(axis=0)
        error = 2 * each.std(axis=0) / len(each) ** 0.5
        axes.fill_between(at, mean - error, mean + error, color=look["color"], alpha=0.2, lw=0)
        axes.plot(at, mean, lw=1.2, label=policy, **look)
    for says, position in marks.items():
        pictures.mark(axes, position, says)
    axes.set(xlabel="position in the text (tokens)", ylabel="loss (nats per token)", xlim=(0, None))
    pictures.legend(figure, 3)
    return runtime.picture(figure, caption)
