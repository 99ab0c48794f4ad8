"""Policies at equal KV budgets: a share of a context of a known length.

Every policy but `full` gets the same number of tokens per KV head, on average over layers, cached
or attended to per query, at the end of prefill. Policies that sample, halve or select among the
tokens between the ends spend about half of it on the ends. The budgets of magicpig and topp follow
from the model's own keys, so their settings are chosen on a text (evals/tasks/tuning.py).
"""

from __future__ import annotations

from typing import NamedTuple

from jaxkv.errors import UserError, check_choice

SINKS = 4
WINDOW = 32  # last queries by which snapkv and pyramidkv select
PAGE = 4  # of quest
RATIOS = {0.75: 1, 0.5: 2, 0.25: 3, 0.125: 4}  # of the context: how often its middle is halved
TUNED = ("magicpig", "topp")
NAMES = ("window", "streaming", "h2o", "reservoir", "stratified", "balance-stream", "uniform",
         "balance", "snapkv", "pyramidkv", "expected-attention", "keydiff", "topk", "quest",
         "oracle", "vattention", *TUNED)  # fmt: skip


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
    share = 0.5 ** RATIOS[check_ratio(ratio)]
    window = round((budget_of(length, ratio) - share * length) / (1 - share)) - SINKS
    return Between(SINKS, window, share)


def check_ratio(ratio: float) -> float:
    """The ratio. Raises UserError for one without a number of halvings."""
    if ratio not in RATIOS:
        raise UserError(
            f"--ratios must be among {', '.join(f'{r:g}' for r in RATIOS)}, got {ratio:g}: prompt "
            "compression halves; use one of these"
        )
    return ratio


def settings(length: int, ratio: float, slots: int, tuned: Tuned | None = None) -> dict[str, str]:
    """The string of every policy, for contexts of `length` tokens.

    slots: slots of growing caches; at least the tokens of a context with its question and answer.
    tuned: None leaves out the policies that need it.
    """
    sinks, window, share = between(length, ratio)
    budget, ends = budget_of(length, ratio), f"sinks={sinks},window={window}"
    best = share / 2
    half = 1 << ((budget // 4).bit_length() - 1)  # a block of balance-stream
    sampled = f"sinks={SINKS},window={budget - SINKS - 2 * half}"
    snap = f"capacity={budget},window={WINDOW},start={slots}"
    halved = f"{ends},rounds={RATIOS[ratio]},start={slots}"
    sparse = f"{ends},start={slots}"
    specs = {
        "window": f"window:window={budget}",
        "streaming": f"streaming:sinks={SINKS},window={budget - SINKS}",
        "h2o": f"h2o:heavy={budget // 2},window={budget // 2}",
        "reservoir": f"reservoir:{sampled},sample={2 * half}",
        "stratified": f"stratified:{sampled},sample={2 * half}",
        "balance-stream": f"balance-stream:{sampled},levels=3,block={half}",
        "uniform": f"uniform:{halved}",
        "balance": f"balance:{halved}",
        "snapkv": f"snapkv:{snap}",
        "pyramidkv": f"pyramidkv:{snap}",
        "expected-attention": f"expected-attention:capacity={budget},start={slots}",
        "keydiff": f"keydiff:capacity={budget},start={slots}",
        "topk": f"topk:share={share:g},{sparse}",
        "quest": f"quest:share={share:g},page={PAGE},fewest=1,{sparse}",
        "oracle": f"oracle:share={share:g},{sparse}",
        # With these bounds it draws the set share and no more.
        "vattention": f"vattention:top={best:g},base={(share - best) / (1 - best):.3g},"
        f"epsilon=0.99,delta=0.99,sides=one,{sparse}",
    }
    if tuned:
        specs["magicpig"] = f"magicpig:K={tuned.bits},L={tuned.tables},{sparse}"
        specs["topp"] = f"topp:mass={tuned.mass:g},{sparse}"
    return specs


def chosen(
    names: list[str] | None, length: int, ratio: float, slots: int, tuned: Tuned | None = None
) -> dict[str, str]:
    """The settings of the named policies; None: of all."""
    specs = settings(length, ratio, slots, tuned)
    return {name: specs[name] for name in names or specs}


def need_tuning(names: list[str] | None) -> bool:
    """Whether one of these policies needs `tuned`; None: all. Raises UserError for unknown ones."""
    for name in names or ():
        check_choice("--policies", name, NAMES)
    return bool(set(TUNED) & set(NAMES if names is None else names))


def budget_of(length: int, ratio: float) -> int:
    """Tokens per KV head."""
    return round(length * ratio)
