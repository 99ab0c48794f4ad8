"""Policies at equal KV budgets: a share of a context of a known length.

Every policy but `full` gets the same number of tokens per KV head, on average over layers, cached
or attended to per query, at the end of prefill. Policies that sample, halve or select among the
tokens between the ends spend about half of it on the ends. The budgets of magicpig and topp follow
from the model's own keys, so their settings are chosen on a novel (`tuned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.magicpig.heads import capture
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.passage import passage

SINKS = 4
WINDOW = 32  # last queries by which snapkv and pyramidkv select, and the window of retrieval
RECENT = 8  # last queries by which rkv selects
PAGE = 4  # of quest
MIN_CAPACITY = 14  # under which vase has no room for its sinks and window
RATIOS = {0.75: 1, 0.5: 2, 0.25: 3, 0.125: 4}  # of the context: how often its middle is halved
TUNED = ("magicpig", "topp")
SCORED = ("kvzip", "kvzap")  # by scores of the context
EQUAL = ("keydiff-unrotated", "retrieval-equal")  # budgets of all KV heads, as a mesh needs them
CALIBRATED = "retrieval-calibrated"
HALF_WINDOW = "retrieval-half-window"  # half of the capacity, in endless text
CALIBRATED_HALF_WINDOW = "retrieval-half-window-calibrated"
QUERIES, QUERY_STRIDE = 256, 16  # tokens after the prompt; every so-many-th is a query
NAMES = ("window", "streaming", "h2o", "reservoir", "stratified", "balance-stream", "uniform",
         "balance", "snapkv", "pyramidkv", "expected-attention", "keydiff", "retrieval", "tova",
         "rkv", "vase", "triattention", CALIBRATED, *SCORED, *EQUAL, "topk",
         "quest", "loki", "oracle", "vattention", *TUNED)  # fmt: skip


class Between(NamedTuple):
    """How many tokens stand at the ends, and the share that is left of those between them."""

    sinks: int
    window: int
    share: float


class Tuned(NamedTuple):
    """K and L of magicpig and the mass of topp that read the share on a text."""

    bits: int
    tables: int
    mass: float


def between(length: int, ratio: float) -> Between:
    """The ends of contexts of `length` tokens for policies that sample, halve or select."""
    share = 0.5 ** RATIOS[ratio]
    window = round((budget_of(length, ratio) - share * length) / (1 - share)) - SINKS
    return Between(SINKS, window, share)


def settings(length: int, ratio: float, slots: int, tuned: Tuned | None = None) -> dict[str, str]:
    """The string of every policy, for contexts of `length` tokens.

    slots: slots of growing caches; at least the tokens of a context with its question and answer.
    tuned: None leaves out the policies that need it.
    """
    budget = budget_of(length, ratio)
    return at_budget(budget, between(length, ratio), RATIOS[ratio], slots, WINDOW, tuned)


def at_budget(
    budget: int, ends: Between, rounds: int, slots: int, queries: int, tuned: Tuned | None = None
) -> dict[str, str]:
    """The string of every policy with a budget of tokens per KV head.

    rounds: how often the tokens between the ends are halved. slots: of growing caches. queries:
    last ones by which snapkv and pyramidkv select, at most half of the budget. tuned: as in
    `settings`.
    """
    queries = min(queries, budget // 2)
    exact, share, best = f"sinks={ends.sinks},window={ends.window}", ends.share, ends.share / 2
    half = 1 << ((budget // 4).bit_length() - 1)  # a block of balance-stream
    sampled = f"sinks={SINKS},window={budget - SINKS - 2 * half}"
    start = f"start={slots}"
    capacity = f"capacity={budget}"
    prompt_form = f"{capacity},every=none,{start}"  # compressed at the end of the prompt
    halved, sparse = f"{exact},rounds={rounds},{start}", f"{exact},{start}"
    specs = {
        "window": f"window:window={budget}",
        "streaming": f"streaming:sinks={SINKS},window={budget - SINKS}",
        "h2o": f"h2o:heavy={budget // 2},window={budget // 2}",
        "reservoir": f"reservoir:{sampled},sample={2 * half}",
        "stratified": f"stratified:{sampled},sample={2 * half}",
        "balance-stream": f"balance-stream:{sampled},levels=3,block={half}",
        "uniform": f"uniform:{halved}",
        "balance": f"balance:{halved}",
        "snapkv": f"snapkv:{capacity},window={queries},{start}",
        "pyramidkv": f"pyramidkv:{capacity},window={queries},{start}",
        "expected-attention": f"expected-attention:{capacity},{start}",
        "keydiff": f"keydiff:{capacity},{start}",
        "retrieval": f"retrieval:{capacity},window={queries},{start}",
        "keydiff-unrotated": f"keydiff:{capacity},keys=unrotated,{start}",
        "retrieval-equal": f"retrieval:{capacity},window={queries},budgets=equal,{start}",
        "tova": f"tova:{prompt_form}",
        "rkv": f"rkv:{prompt_form},window={min(RECENT, budget // 4)}",
        "vase": f"vase:{prompt_form},window={budget // 8},sinks={min(SINKS, budget // 4)}",
        "triattention": f"triattention:{prompt_form}",
        "topk": f"topk:share={share:g},{sparse}",
        "quest": f"quest:share={share:g},page={PAGE},fewest=1,{sparse}",
        "loki": f"loki:share={share:g},{sparse}",
        "oracle": f"oracle:share={share:g},{sparse}",
        # With these bounds it draws the set share and no more.
        "vattention": f"vattention:top={best:g},base={(share - best) / (1 - best):.3g},"
        f"epsilon=0.99,delta=0.99,sides=one,{sparse}",
    }
    if tuned:
        specs["magicpig"] = f"magicpig:K={tuned.bits},L={tuned.tables},{sparse}"
        specs["topp"] = f"topp:mass={tuned.mass:g},{sparse}"
    return specs


def repeated(
    budget: int, every: int, queries: int, calibration: str | None = None
) -> dict[str, str]:
    """The string of every policy that compresses again and again, for endless text.

    budget: the most tokens that a query sees per KV head. every: tokens between two compressions,
    one under tova. queries: last ones by which snapkv and pyramidkv select, at most half of those.
    calibration: the name of the model's head shares, for the policy with calibrated budgets.

    Raises UserError where `every` leaves fewer than MIN_CAPACITY tokens of the budget.
    """
    rest = budget - every
    if rest < MIN_CAPACITY:
        raise UserError(
            f"every must leave at least {MIN_CAPACITY} tokens of the budget, got every={every} and "
            f"budget={budget}; give a smaller every, or a larger budget"
        )
    queries = min(queries, rest // 2)
    capacity = f"capacity={rest},every={every}"
    half = f"retrieval:{capacity},window={rest // 2}"
    calibrated = f"{half},budgets=calibrated,calibration={calibration}"
    return {
        "snapkv": f"snapkv:{capacity},window={queries}",
        "pyramidkv": f"pyramidkv:{capacity},window={queries}",
        "expected-attention": f"expected-attention:{capacity}",
        "keydiff": f"keydiff:{capacity}",
        "retrieval": f"retrieval:{capacity},window={queries}",
        "tova": f"tova:capacity={budget - 1}",
        "rkv": f"rkv:{capacity},window={min(RECENT, rest // 4)}",
        "vase": f"vase:{capacity},window={rest // 8},sinks={SINKS}",
        "triattention": f"triattention:{capacity}",
        HALF_WINDOW: half,
        **({CALIBRATED_HALF_WINDOW: calibrated} if calibration is not None else {}),
    }


def budget_of(length: int, ratio: float) -> int:
    """Tokens per KV head."""
    return round(length * ratio)


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
        arguments = llm.spec, seen, length, sinks, window, QUERY_STRIDE
        tables = matched_budgets.tables(matched_budgets.angles(*arguments), share)
        by_ratio[ratio] = Tuned(*tables, matched_budgets.masses(*arguments).reaching(share))
    return by_ratio
