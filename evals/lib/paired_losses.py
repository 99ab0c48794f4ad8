"""Losses of several cases on the same texts, compared token by token.

A case is a cache policy, or re-computation of a window. All cases read the same texts, so the
difference from one of them, the base, has a far smaller spread than the losses. Intervals are over
texts. A record holds means over bins of tokens, by text.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts, named
from jaxkv.evals.lib.record import Record, standard_error
from jaxkv.evals.lib.run import Run, flag
from jaxkv.evals.lib.text import beginnings
from jaxkv.models.generation.score import gather
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import recompute

BIN = 256  # tokens per mean
TOKENS = flag("--tokens", 20_000, "read of each text, at most", minimum=BIN)


@dataclass(frozen=True)
class Case:
    """policy: a policy string, or recompute:window=W.

    prefix: texts that are encoded one by one and put in front of each text, without its BOS. every:
    only every so-many-th token is predicted. tokens: read only this beginning of each text.
    """

    policy: str
    prefix: tuple[str, ...] = ()
    every: int = 1
    tokens: int | None = None


ByText = dict[str, dict[str, Any]]


def texts_of(run: Run) -> dict[str, list[int]]:
    """The beginnings of the texts of an experiment, with the flag TOKENS."""
    return beginnings(run.llm, run.options.texts, run.options.tokens + 1)


def measure_cases(
    llm: Llm,
    texts: Mapping[str, Sequence[int]],
    cases: Mapping[str, Case],
    base: str,
    record: Record,
) -> ByText:
    """By text and case, the mean loss of each bin of tokens, with the commit that measured it.

    texts: token ids by name, the stem of their file. The parts of an interrupted run are kept.
    """
    parts, by_text = Parts(record, len(texts) * len(cases)), {}
    for text, ids in texts.items():
        losses = {name: part_of(parts, llm, text, ids, case) for name, case in cases.items()}
        bins: dict[str, Any] = {}
        for name, (case_losses, commit) in losses.items():
            bins[name] = {"commit": commit, "loss": bin_means(case_losses)}
            if cases[name].every > 1:  # the losses of the base at the predicted tokens
                of_base = losses[base][0][: len(case_losses)]
                bins[name]["base"] = bin_means(np.where(np.isnan(case_losses), np.nan, of_base))
        by_text[text] = {"tokens": len(ids) - 1, "bins": bins}
    return by_text


def part_of(
    parts: Parts, llm: Llm, text: str, ids: Sequence[int], case: Case
) -> tuple[np.ndarray, str]:
    """The losses of one case on one text, and the commit that measured them."""
    ids = ids if case.tokens is None else ids[: case.tokens + 1]
    hash_ = zlib.crc32(np.asarray(ids, np.int32).tobytes())
    cached = recompute.window_of(case.policy) is None
    policy = named(case.policy, llm.policies(case.policy) if cached else ())
    key = f"{llm.name}, {text}, {hash_:x}, {policy}, {case.prefix!r}, every {case.every}"
    return parts.part(key, lambda: losses_of(llm, ids, case)), parts.commit_of[key]


def losses_of(llm: Llm, ids: Sequence[int], case: Case) -> np.ndarray:
    """The losses of tokens 1, 2, ... of a text, NaN where none was computed.

    Exits where a loss is not finite.
    """
    window = recompute.window_of(case.policy)
    prefix = [i for part in case.prefix for i in llm.tokenizer.encode(part, bos=False)]
    if window:
        chunks = recompute.losses(llm, ids, window, case.every)
    else:
        policy = f"full:max={len(prefix) + len(ids)}" if case.policy == "full" else case.policy
        chunks = models.losses(llm, [*prefix, *ids], policy)
    losses = gather(chunks)[0].astype(np.float64)[len(prefix) :]
    later = len(losses) - min(window or len(losses), len(losses))  # those that `every` thins out
    if np.isfinite(losses).sum() != len(losses) - later + later // case.every:
        raise SystemExit(f"{case.policy} gives losses that are not finite; nothing is written")
    return losses


def bin_means(losses: np.ndarray) -> list[float]:
    """The mean of each whole bin of tokens, over the losses that were computed."""
    size = len(losses) // BIN * BIN
    return np.nanmean(losses[:size].reshape(-1, BIN), axis=1).tolist()


def loss_over_base(entry: Mapping[str, Any], name: str, base: str) -> np.ndarray:
    """A case's loss minus the base's, of the same tokens, by bin of one text."""
    mine = entry["bins"][name]
    base_losses = mine.get("base", entry["bins"][base]["loss"])
    size = min(len(mine["loss"]), len(base_losses))
    return np.array(mine["loss"][:size]) - np.array(base_losses[:size])


def excess(losses: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """Losses [seeds,texts] minus the base's: the mean, two standard errors over texts and over
    seeds, and the difference by text."""
    difference = losses - base
    errors = {
        name: 2 * standard_error(means) if len(means) > 1 else None
        for name, means in (
            ("stretches", difference.mean(axis=0)),
            ("seeds", difference.mean(axis=1)),
        )
    }
    return {
        "mean": difference.mean(),
        "two_errors": errors,
        "each": difference.mean(axis=0).tolist(),
    }


def compare(
    by_text: ByText, names: Sequence[str], base: str, skip: int, end: int | None = None
) -> dict[str, Any]:
    """The cases on the bins that each of them has, beyond the first `skip` tokens, up to `end`.

    `rows` has by case the perplexity, and the loss minus the base's. Where a case predicts only
    some tokens, its perplexity is that of the base times the exponential of this difference. skip,
    end: multiples of BIN. Exits where a text is too short.
    """
    shared = min(len(entry["bins"][name]["loss"]) for entry in by_text.values() for name in names)
    last = shared if end is None else min(shared, end // BIN)
    if last <= skip // BIN:
        raise UserError(
            f"a text must have more than {skip:,} tokens to compare {', '.join(names)}, got "
            f"{shared * BIN:,}; give longer texts or larger --tokens"
        )
    bins = slice(skip // BIN, last)
    of_base = np.mean([np.mean(entry["bins"][base]["loss"][bins]) for entry in by_text.values()])
    rows = {}
    for name in names:
        gaps = [
            float(np.mean(loss_over_base(entry, name, base)[bins])) for entry in by_text.values()
        ]
        rows[name] = {
            "perplexity": np.exp(of_base + np.mean(gaps)),
            "loss_over_base": np.mean(gaps),
            "standard_error": standard_error(gaps),
            "loss_over_base_by_text": gaps,
        }
    return {"tokens": [skip, last * BIN], "rows": rows}


def record_header(llm: Llm, cases: Mapping[str, Case], by_text: ByText) -> dict[str, Any]:
    """What every record of paired losses begins with."""
    return {
        "model": llm.name,
        "context": llm.config.context,
        "texts": {text: entry["tokens"] for text, entry in by_text.items()},
        "cases": {name: asdict(case) for name, case in cases.items()},
        "by_text": by_text,
    }
