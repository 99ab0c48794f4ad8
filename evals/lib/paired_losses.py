"""Losses of several cases on the same texts, compared token by token.

A case is a cache policy, or re-computation of a window. All cases read the same texts, so the
difference from one of them, the base, has a far smaller spread than the losses. Intervals are over
texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.parts import Parts
from jaxkv.models import recompute
from jaxkv.models.llm import Llm
from jaxkv.models.score import gather


@dataclass(frozen=True)
class Case:
    """policy: a policy string, or recompute:window=W. front: text in front of each text.

    every: only every so-many-th token is predicted. tokens: read only this beginning of each text.
    """

    policy: str
    front: str = ""
    every: int = 1
    tokens: int | None = None


Losses = dict[str, list[np.ndarray]]  # by case, an array per text


def losses_of(llm: Llm, ids: Sequence[int], case: Case) -> np.ndarray:
    """The losses of tokens 1, 2, ... of a text, NaN where none was computed."""
    ids = ids if case.tokens is None else ids[: case.tokens + 1]
    window = recompute.window_of(case.policy)
    front = llm.tokenizer.encode(case.front) if case.front else []
    if window:
        found = recompute.losses(llm, ids, window, case.every)
    else:
        policy = f"full:max={len(front) + len(ids)}" if case.policy == "full" else case.policy
        found = models.losses(llm, [*front, *ids], policy)
    return gather(found)[0].astype(np.float64)[len(front) :]


def measure(
    llm: Llm, texts: Mapping[str, Sequence[int]], cases: Mapping[str, Case], parts: Parts
) -> Losses:
    """The losses of all cases on all texts. Parts are kept, so an interrupted run continues."""
    losses: Losses = {name: [] for name in cases}
    for text, ids in texts.items():
        for name, case in cases.items():
            key = f"{llm.name}, {text}, {name}, {min(len(ids), (case.tokens or len(ids)) + 1)}"
            losses[name].append(parts.part(key, lambda c=case, s=ids: losses_of(llm, s, c)))
    return losses


def compare(
    losses: Losses, names: Sequence[str], base: str, skip: int
) -> dict[str, dict[str, Any]]:
    """Perplexity of each case, and its loss minus the base's, beyond the first `skip` tokens."""
    found = {}
    for name in names:
        pairs = list(zip(losses[name], losses[base], strict=True))
        paired = [[one[skip : min(map(len, pair))] for one in pair] for pair in pairs]
        over = [float(np.nanmean(one - other)) for one, other in paired]
        own = [float(np.nanmean(one)) for one, _ in paired]
        found[name] = {
            "perplexity": np.exp(np.mean(own)),
            "loss": np.mean(own),
            "loss_over_base": np.mean(over),
            "standard_error": np.std(over, ddof=1) / len(over) ** 0.5 if len(over) > 1 else 0.0,
            "loss_over_base_by_text": over,
            "predictions": sum(int(np.isfinite(one).sum()) for one, _ in paired),
        }
    return found
