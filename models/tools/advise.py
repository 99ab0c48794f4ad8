"""Measures cache policies at equal budgets on stretches of a text, against full attention.

Every stretch has a prompt, which is longer than the caches, and tokens after it that are scored
(`measurement`). So policies that evict and policies that act on a prompt are compared on the same
tokens. Errors are those of means over stretches, because the tokens of one stretch share a cache.
A text of fewer than eight stretches has several blocks in each, which are taken as independent.

The recall of distant text is measured where the text repeats itself: at the last of REPEAT tokens
that occurred before in this order, the latest time at some distance. A cache that evicted the
earlier occurrence predicts them worse than full attention does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.models.generation.score import Score
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import budgets, measurement
from jaxkv.models.tools.measurement import Stretches, WatchTask, is_noise, paired
from jaxkv.policies import Full
from jaxkv.policy_spec import format_policy, max_lookback
from jaxkv.typing import Bool, Float, Int32

FULL = "full"
SCORED, STRETCHES = 64, 8  # scored tokens of a stretch, and stretches, unless chosen
STRETCH = 512  # tokens of a stretch that the model reads, unless its trained context is shorter
BLOCK = 16  # the shortest block, in tokens
MIN_BLOCKS = 8  # fewer give no useful error
REPEAT = 3  # tokens of a repeated sequence


def check_not_full(llm: Llm, policy: str) -> None:
    """Raise UserError for full attention, which is the baseline and exceeds every budget."""
    if set(map(_without_start, llm.policies(policy))) == {Full()}:
        raise UserError(f"full is always measured, got --policy {policy}; leave it out")


def _without_start(policy: Policy) -> Policy:
    """Full attention with its default slots: their number changes no result."""
    return replace(policy, max=Full.max, start=Full.start) if isinstance(policy, Full) else policy


def cut(
    llm: Llm, ids: Sequence[int], prompt: int | None, scored: int | None, stretches: int | None
) -> Stretches:
    """The stretches of a text; None chooses each size. ids: with the BOS and sinks in front.

    Raises UserError where the text is too short, or a stretch longer than the trained context.
    """
    context = llm.config.context
    scored = scored or min(SCORED, context // 8)
    prompt = prompt or min(STRETCH, context) - scored
    if prompt + scored > context:
        raise UserError(
            f"a stretch must fit the trained context of {context} tokens, because full attention "
            f"is measured too, got {prompt} of prompt and {scored} scored; lower --prompt-tokens "
            "or --score-tokens"
        )
    return measurement.cut(llm, ids, prompt, scored, stretches, STRETCHES)


def block_of(text: Stretches, block: int | None) -> int:
    """Tokens per block, from which errors are computed: those of a stretch, unless these are few.

    Blocks divide the scored tokens of a stretch, because a shorter rest would count as a block too.
    Raises UserError where they do not, or are too few.
    """
    stretches, scored = len(text.tokens), text.scored
    needed = -(-MIN_BLOCKS // stretches)
    divisors = [size for size in range(1, scored // needed + 1) if scored % size == 0]
    longest = max(divisors, default=0)
    if block is None and longest < BLOCK:
        raise UserError(
            f"errors need at least {MIN_BLOCKS} equal blocks of {BLOCK} scored tokens or more, "
            f"and the text has {stretches} stretches with {scored}; give a longer text, a lower "
            "--prompt-tokens or other --score-tokens"
        )
    if block is not None and block not in divisors:
        remedy = f"a divisor of {scored} up to {longest}" if longest else "a longer text"
        raise UserError(
            f"errors need at least {MIN_BLOCKS} equal blocks, and {stretches} stretches have "
            f"{scored} scored tokens each, got --block {block}; give {remedy}"
        )
    return block or longest


def check_evicts(llm: Llm, policies: Sequence[str], text: Stretches) -> None:
    """Raise UserError for a cache that the prompt does not fill: it would be full attention."""
    for policy in policies:
        slots = budgets.slots_of(llm, llm.policies(policy))
        if slots > text.prompt:
            raise UserError(
                f"the prompt must fill every cache: {policy} caches {slots} tokens, got a prompt "
                f"of {text.prompt}; raise --prompt-tokens, or lower --budget"
            )


def measure(
    llm: Llm,
    text: Stretches,
    policies: Sequence[str],
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Score]:
    """The scores of full attention and of the policies that are complete.

    stopped: asked after every chunk and round whether to end. Raises UserError before the first
    one if any policy cannot run.
    """
    scores = measurement.measure(
        llm, text, [FULL, *policies], seed, watch, stopped, full=FULL, decode=True
    )
    return [score for score in scores if text.is_complete(score)]


def repeat_distances(ids: Sequence[int]) -> Int32[np.ndarray, " N"]:
    """By token 1, 2, ...: the tokens back to the latest earlier end of the same REPEAT tokens.

    0 where these tokens did not occur before.
    """
    latest: dict[tuple[int, ...], int] = {}
    distances = np.zeros(len(ids) - 1, np.int32)
    for end in range(REPEAT - 1, len(ids)):
        words = tuple(int(token) for token in ids[end - REPEAT + 1 : end + 1])
        if words in latest:
            distances[end - 1] = end - latest[words]
        latest[words] = end
    return distances


def rank(
    llm: Llm, text: Stretches, scores: Sequence[Score], budget: int, block: int
) -> dict[str, Any]:
    """The report: full attention, then the policies within the budget by their loss, then others.

    budget: bytes. block: tokens per block, from which errors are computed.
    """
    predicted = text.tokens[:, text.prompt + 1 :] < llm.config.vocab  # all but sink tokens
    by_name = {score.policy: score for score in scores}
    losses = {name: score.by_stretch for name, score in by_name.items()}
    state_bytes = {name: budgets.bytes_of(llm, name, text.prompt, text.scored) for name in losses}
    by_loss = sorted(losses, key=lambda name: losses[name][predicted].mean())
    full = [name for name in losses if name == FULL]
    within = [name for name in by_loss if name != FULL and state_bytes[name] <= budget]
    beyond = [name for name in by_loss if name != FULL and state_bytes[name] > budget]
    ranked = within or beyond
    evicting = [name for name in within if not budgets.acts_on_prompt(llm.policies(name))]
    slots = [budgets.slots_of(llm, llm.policies(name)) for name in evicting]
    near = min(slots, default=0) or text.scored
    rows = []
    for name in (*full, *within, *beyond):
        over_full = losses[name] - losses.get(FULL, np.full_like(losses[name], np.nan))
        over_best = losses[name] - losses[(ranked or full)[0]]
        rows.append(
            _row(llm, text, by_name[name], predicted, block)
            | {
                "over_full": paired(over_full, block, predicted),
                "over_best": paired(over_best, block, predicted),
                "state_bytes": state_bytes[name],
                "within_budget": state_bytes[name] <= budget,
            }
            | _at_repeats(text, over_full, predicted, near, block)
        )
    return {
        "budget": budget,
        "split": llm.mesh is not None and llm.mesh.shape.get("model", 1) > 1,
        "stretches": len(text.tokens),
        "prompt": text.prompt,
        "scored": text.scored,
        "block": block,
        "counted": int(predicted.sum()),
        "near": near,
        "levels": _levels(ranked, losses, predicted, block),
        "policies": rows,
    }


def _row(
    llm: Llm, text: Stretches, score: Score, predicted: Bool[np.ndarray, "S C"], block: int
) -> dict[str, Any]:
    """What the report says of one policy alone."""
    policies = llm.policies(score.policy)
    loss = float(score.by_stretch[predicted].mean())
    times = score.milliseconds
    return {
        "policy": score.policy,
        "policy_string": format_policy(policies),
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        "kl": paired(score.kl, block, predicted),
        "agreement": float(score.agreement[predicted].mean()),
        "milliseconds_per_token": None
        if not times
        else {"median": float(np.median(times)), "min": min(times), "max": max(times)},
        "prompt_bytes": budgets.prompt_bytes_of(llm, score.policy, text.prompt),
        "acts_on_prompt": budgets.acts_on_prompt(policies),
        # No distance exceeds the trained context, however long the text is.
        "endless": max(map(max_lookback, policies)) <= llm.config.context,
        "seconds": score.seconds,
        "compile_seconds": score.compile_seconds,
    }


def _at_repeats(
    text: Stretches,
    over_full: Float[np.ndarray, "S C"],
    predicted: Bool[np.ndarray, "S C"],
    near: int,
    block: int,
) -> dict[str, Any]:
    """The loss over full attention at tokens that end a repeated sequence, by its distance.

    near: tokens of the smallest cache. The bins are the distances within it, and then by powers of
    two of its size.
    """
    distances = np.stack([repeat_distances(ids) for ids in text.tokens])[:, text.prompt :]
    edges = [1, near]
    while edges[-1] < text.fed:
        edges.append(2 * edges[-1])
    bins = [
        {"from": start, "to": end}
        | paired(over_full, block, predicted & (distances >= start) & (distances < end))
        for start, end in itertools.pairwise(edges)
    ]
    return {"recall": bins, "far_recall": paired(over_full, block, predicted & (distances >= near))}


def _levels(
    policies: Sequence[str], losses: Mapping[str, np.ndarray], predicted: np.ndarray, block: int
) -> list[list[str]]:
    """Groups of policies by their loss; the others of a group are within noise of its first."""
    unranked, levels = list(policies), []
    while unranked:
        first = losses[unranked[0]]
        levels.append(
            [name for name in unranked if is_noise(paired(losses[name] - first, block, predicted))]
        )
        unranked = [name for name in unranked if name not in levels[-1]]
    return levels
