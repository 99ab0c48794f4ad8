"""Settings of magicpig and topp that read a given share of the keys, chosen on a novel."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv.errors import UserError
from jaxkv.evals.lib.text import passage
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.magicpig.heads import capture
from jaxkv.evals.tasks.budgets import Tuned, between
from jaxkv.models.loading.llm import Llm

QUERIES, EVERY = 256, 16  # tokens after the prompt; every so-many-th is a query


def tuned(llm: Llm, length: int, ratios: Sequence[float]) -> dict[float, Tuned]:
    """By ratio, the settings for contexts of `length` tokens.

    On the tasks the share that is read may differ, because their texts do.
    """
    ids = passage(llm, length + QUERIES)
    if len(ids) < length + QUERIES:
        raise UserError(
            f"magicpig and topp are tuned on a novel of {len(ids)} tokens, and --lengths {length} "
            f"needs {length + QUERIES}; name other --policies"
        )
    seen, by_ratio = [capture(llm, ids)], {}
    for ratio in ratios:
        sinks, window, share = between(length, ratio)
        arguments = llm.spec, seen, length, sinks, window, EVERY
        tables = matched_budgets.tables(matched_budgets.angles(*arguments), share)
        by_ratio[ratio] = Tuned(*tables, matched_budgets.masses(*arguments).reaching(share))
    return by_ratio
