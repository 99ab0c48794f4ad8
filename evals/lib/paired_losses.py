"""Losses of several cases on the same texts, compared token by token.

A case is a cache policy, or re-computation of a window. All cases read the same texts, so the
difference from one of them, the base, has a far smaller spread than the losses. Intervals are over
texts. A record holds means over bins of tokens, by text, and a later run measures only what the
record lacks: the experiments take hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import Record, read
from jaxkv.models import recompute
from jaxkv.models.llm import Llm
from jaxkv.models.score import gather

BIN = 256  # tokens per mean


@dataclass(frozen=True)
class Case:
    """policy: a policy string, or recompute:window=W. front: text in front of each text.

    every: only every so-many-th token is predicted. tokens: read only this beginning of each text.
    """

    policy: str
    front: str = ""
    every: int = 1
    tokens: int | None = None


ByText = dict[str, dict[str, Any]]


def measure(
    llm: Llm,
    texts: Mapping[str, Sequence[int]],
    cases: Mapping[str, Case],
    base: str,
    record: Record,
) -> ByText:
    """By text and case, the mean loss of each bin of tokens.

    texts: token ids by name. Texts and cases that the committed record has already are taken from
    it, with the commit that measured them.
    """
    parts, known = Parts(record, len(cases) * len(texts)), known_bins(llm, cases, record)
    found: ByText = {}
    for text, ids in texts.items():
        earlier = known.get(text, {"tokens": 0, "bins": {}})
        earlier = earlier["bins"] if earlier["tokens"] == len(ids) - 1 else {}

        @cache
        def losses(name: str, text: str = text, ids: Sequence[int] = ids) -> tuple[np.ndarray, str]:
            case = cases[name]
            key = f"{llm.name}, {text}, {name}, {min(len(ids), (case.tokens or len(ids)) + 1)}"
            return parts.part(key, lambda: losses_of(llm, ids, case)), parts.made[key]

        bins = {name: earlier[name] for name in cases if name in earlier}
        for name in (name for name in cases if name not in earlier):
            some, commit = losses(name)
            bins[name] = {"commit": commit, "loss": binned(some)}
            if cases[name].every > 1:
                of_base = losses(base)[0][: len(some)]
                bins[name]["base"] = binned(np.where(np.isnan(some), np.nan, of_base))
        found[text] = {"tokens": len(ids) - 1, "bins": {name: bins[name] for name in cases}}
    return found


def known_bins(llm: Llm, cases: Mapping[str, Case], record: Record) -> ByText:
    """What the record of that name holds for this model and for cases that are still the same."""
    if not record.file.exists():
        return {}
    results = read(record.file.stem, record.file.parent)["results"]
    if results.get("model") != llm.name:
        return {}
    same = {name for name, case in cases.items() if results["cases"].get(name) == asdict(case)}
    return {
        text: one | {"bins": {name: bins for name, bins in one["bins"].items() if name in same}}
        for text, one in results["by_text"].items()
    }


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


def binned(losses: np.ndarray) -> list[float]:
    """The mean of each whole bin of tokens, over the losses that were computed."""
    size = len(losses) // BIN * BIN
    return np.nanmean(losses[:size].reshape(-1, BIN), axis=1).tolist()


def over(one: Mapping[str, Any], name: str, base: str) -> np.ndarray:
    """A case's loss minus the base's, of the same tokens, by bin of one text."""
    mine = one["bins"][name]
    theirs = mine.get("base", one["bins"][base]["loss"])
    size = min(len(mine["loss"]), len(theirs))
    return np.array(mine["loss"][:size]) - np.array(theirs[:size])


def compare(by_text: ByText, names: Sequence[str], base: str, skip: int) -> dict[str, Any]:
    """Perplexity of each case, and its loss minus the base's, beyond the first `skip` tokens.

    All cases are compared on the bins that each of them has. skip: a multiple of BIN.
    """
    ends = [min(len(one["bins"][name]["loss"]) for name in names) for one in by_text.values()]
    found = {}
    for name in names:
        own, gaps = [], []
        for one, end in zip(by_text.values(), ends, strict=True):
            some = slice(skip // BIN, end)
            own.append(np.mean(one["bins"][name]["loss"][some]))
            gaps.append(float(np.mean(over(one, name, base)[some])))
        found[name] = {
            "perplexity": np.exp(np.mean(own)),
            "loss": np.mean(own),
            "loss_over_base": np.mean(gaps),
            "standard_error": np.std(gaps, ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0,
            "loss_over_base_by_text": gaps,
        }
    return found


def described(llm: Llm, cases: Mapping[str, Case], by_text: ByText) -> dict[str, Any]:
    """What every record of paired losses begins with."""
    return {
        "model": llm.name,
        "context": llm.config.context,
        "texts": {text: one["tokens"] for text, one in by_text.items()},
        "cases": {name: asdict(case) for name, case in cases.items()},
        "by_text": by_text,
    }
