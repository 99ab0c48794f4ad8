"""Policies at equal KV budgets: a share of a context of a known length.

Every policy but `full` gets the same number of tokens per KV head, on average over layers, cached
or attended to per query, at the end of prefill. Policies that sample, halve or select among the
tokens between the ends spend about half of it on the ends. `topp` is left out: it chooses its own
budget.
"""

from __future__ import annotations

from jaxkv.errors import UserError, check_choice

SINKS = 4
WINDOW = 32  # last queries by which snapkv and pyramidkv select
PAGE = 4  # of quest
RATIOS = {0.5: 1, 0.25: 2, 0.125: 3}  # of the context: how often it is halved


def settings(length: int, ratio: float, slots: int) -> dict[str, str]:
    """The string of every policy, for contexts of `length` tokens.

    slots: of growing caches; at least the tokens of a context with its question and answer.
    """
    if ratio not in RATIOS:
        raise UserError(
            f"--ratios must be among {', '.join(f'{r:g}' for r in RATIOS)}, got {ratio:g}: prompt "
            "compression halves; choose one of these"
        )
    budget = budget_of(length, ratio)
    # Halving once more than the ratio asks for leaves room for the ends.
    share = ratio / 2
    ends = f"sinks={SINKS},window={round((budget - share * length) / (1 - share)) - SINKS}"
    best = share / 2
    half = 1 << ((budget // 4).bit_length() - 1)  # a block of balance-stream
    sampled = f"sinks={SINKS},window={budget - SINKS - 2 * half}"
    snap = f"capacity={budget},window={WINDOW},start={slots}"
    halved = f"{ends},rounds={RATIOS[ratio] + 1},start={slots}"
    sparse = f"{ends},start={slots}"
    return {
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


def chosen(names: list[str] | None, length: int, ratio: float, slots: int) -> dict[str, str]:
    """The settings of the named policies; None: of all."""
    found = settings(length, ratio, slots)
    for name in names or ():
        check_choice("--policies", name, found)
    return {name: found[name] for name in names or found}


def budget_of(length: int, ratio: float) -> int:
    """Tokens per KV head."""
    return round(length * ratio)
