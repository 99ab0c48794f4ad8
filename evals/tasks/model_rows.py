"""Rows that follow from the model: contexts scored by KVzip or KVzap, and calibrated head budgets.

KVzip scores a context while the model repeats it. KVzap predicts these scores; it is fitted to the
beginning of the novel from which head budgets are calibrated. Neither sees the question. The KV
heads of all layers compete for the budget, as in KVzip's published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.tasks.budgets import (
    CALIBRATED,
    CALIBRATED_HALF_WINDOW,
    SCORED,
    budget_of,
)
from jaxkv.models.generation.context_scores import (
    around_context,
    context_scores,
    repeatable_tokens,
)
from jaxkv.models.generation.kvzap import FIT_TOKENS, KVzap, fit_kvzap, kvzap_scores
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policies.prompt_compression import head_shares
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.typing import Float32

CHARACTERS = 6000  # of the novel: a passage of FIT_TOKENS, as `jaxkv calibrate` reads, and a rest
NEWEST = 128  # tokens that KVzap's published code keeps; here at most a quarter of the budget


def check(llm: Llm, policies: Sequence[str], query_aware: bool = False) -> None:
    """Raise UserError for rows that the model, or a question in the prefill, rules out."""
    scored = [name for name in policies if name in SCORED]
    if scored and query_aware:
        raise UserError(
            f"{' and '.join(scored)} score a context before its question is known, got "
            "--query-aware; leave one out"
        )
    calibrated = [name for name in policies if name in (CALIBRATED, CALIBRATED_HALF_WINDOW)]
    if calibrated and calibration_of(llm) is None:
        raise UserError(
            f"{' and '.join(calibrated)} needs head shares in the package, which has those of "
            f"{' and '.join(head_shares.shipped())}, got {llm.name}; name other --policies"
        )


def calibration_of(llm: Llm) -> str | None:
    """The name of the model's head shares in the package."""
    prints = {head_shares.read(name).fingerprint: name for name in head_shares.shipped()}
    return prints.get(llm.source_fingerprint)


def settings(llm: Llm, length: int, ratio: float, slots: int, retrieval: str) -> dict[str, str]:
    """The string of each row. retrieval: that of `retrieval`. Others: as in `budgets.settings`."""
    budget = budget_of(length, ratio)
    scored = f"capacity={budget},start={slots}"
    return {
        "kvzip": f"kvzip:{scored}",
        "kvzap": f"kvzap:{scored},window={min(NEWEST, budget // 4)}",
        CALIBRATED: f"{retrieval},budgets=calibrated,calibration={calibration_of(llm)}",
    }


def policy_of(text: str) -> str | Scored:
    """The policy of a row: `Scored`, which no string names, or the string."""
    name, _, fields = text.partition(":")
    if name not in SCORED:
        return text
    values = (field.split("=") for field in fields.split(","))
    return Scored(budgets="global", **{field: int(value) for field, value in values})


@lru_cache(maxsize=64)  # for all ratios of a batch
def scores(llm: Llm, method: str, context: tuple[int, ...]) -> Float32[np.ndarray, "L K S"]:
    """The scores of the tokens of a context. method: of SCORED."""
    if method == "kvzap":
        return kvzap_scores(llm, kvzap(llm), context)
    front, _ = around_context(llm)
    return context_scores(llm, context, len(front))


@cache
def kvzap(llm: Llm) -> KVzap:
    """The weights of KVzap, fitted once in a run."""
    return fit_kvzap(llm, novel())


def fitted_tokens(llm: Llm) -> int:
    """The number of tokens to which KVzap is fitted."""
    count = len(llm.tokenizer.encode(novel(), bos=False, start=False))
    return count - count % repeatable_tokens(llm, FIT_TOKENS)


def novel() -> str:
    return PASSAGE.read_text("utf-8")[:CHARACTERS]
