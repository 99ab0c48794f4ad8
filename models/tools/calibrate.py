"""Calibrates head budgets: how much of a KV budget each KV head of a model needs.

A head that retrieves gives much attention to the keys of a text while the model repeats it
(`context_scores`). The mean score of its keys is the head's share of the budget of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from jaxkv.errors import UserError, check_int
from jaxkv.models.generation.context_scores import around_context, context_scores, repeatable_tokens
from jaxkv.models.loading.llm import Llm
from jaxkv.policies.prompt_compression.head_shares import HeadShares

TOKENS = 1024  # of a text at most, unless chosen
MIN_TOKENS = 32  # of a text: fewer say nothing about heads
DIGITS = 6  # of a share; all shares add up to 1


def calibrate(
    llm: Llm,
    text: str,
    tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeadShares:
    """The head shares of a model from the first `tokens` tokens of a text.

    tokens: None takes TOKENS, or as many as fit the trained context twice. progress: called with
    (tokens done, all tokens) over all layers. Raises UserError for a text of fewer than MIN_TOKENS
    tokens, or one that is too long for the model.
    """
    front, _ = around_context(llm)
    tokens = repeatable_tokens(llm, TOKENS) if tokens is None else tokens
    check_int("tokens", tokens)
    if tokens < MIN_TOKENS:
        raise UserError(
            f"head shares need at least {MIN_TOKENS} tokens, which the model repeats, got {tokens} "
            f"with a trained context of {llm.config.context}; give more, or another model"
        )
    ids = llm.tokenizer.encode(text, bos=False, start=False)[:tokens]
    if len(ids) < MIN_TOKENS:
        raise UserError(
            f"head shares need a text of at least {MIN_TOKENS} tokens, got {len(ids)}; give a "
            "longer one, such as a page of a book"
        )
    scores = context_scores(llm, [*front, *ids], len(front), progress)
    means = scores[:, :, len(front) :].mean(axis=2, dtype=np.float64)
    shares = np.round(means / means.sum(), DIGITS)
    spec = llm.spec
    return HeadShares(
        name=llm.name,
        fingerprint=llm.source_fingerprint,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        encoding=spec.encoding,
        text={"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(ids)},
        shares=tuple(map(tuple, shares.tolist())),
    )


def strongest(head_shares: HeadShares, count: int) -> list[tuple[str, float]]:
    """The heads with the largest shares, written LAYER.HEAD, and their multiples of the mean."""
    shares = np.array(head_shares.shares)
    order = np.argsort(-shares, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, shares.shape), strict=True)
    return [
        (f"{layer}.{head}", float(shares[layer, head] / shares.mean())) for layer, head in places
    ]
