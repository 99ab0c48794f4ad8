"""Laws 12 and 13, which hold for some policies and need a number from the caller."""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.contract import Partial
from jaxkv.testing.subject import (
    BATCH,
    Checks,
    Subject,
    cached,
    cut,
    draw_tokens,
    finish_prefill,
    rotate,
    take_sequences,
    update,
)
from jaxkv.typing import Float

MANY = 4000  # sequences whose mean is compared with full attention
ERRORS = 4  # standard errors that the mean may be away
HOSTILE = 1e3  # factor of the keys after those that must stay


def estimates_are_unbiased(subject: Subject, tokens: int) -> Checks:
    """Of one text of `tokens` tokens, read by sequences that differ in their seeds only.

    Numerator and denominator of the last token's softmax must each be those of full attention in
    the mean; their quotient, the output, is not unbiased.
    """
    one = take_sequences(draw_tokens(subject.spec, tokens, dtype=subject.tokens.q.dtype), [0])
    truths = _numerator_and_denominator(subject, one)
    partial = _last_of_many(subject, one)
    out, lse = (np.asarray(leaf, np.float64)[:, 0] for leaf in partial)
    found = out * np.exp(lse)[..., None], np.exp(lse)
    for name, estimate, truth in zip(("numerator", "denominator"), found, truths, strict=True):
        error = estimate.std(axis=0) / np.sqrt(MANY)
        yield f"the {name} after {tokens} tokens does not depend on the seed", (error > 0).all()
        away = np.abs(estimate.mean(axis=0) - truth) / np.where(error > 0, error, 1)
        yield (
            f"the mean {name} after {tokens} tokens is {away.max():.1f} standard errors from that "
            f"of full attention, and must be within {ERRORS}",
            bool(away.max() < ERRORS),
        )


def protected_tokens_stay(subject: Subject, first: int, newest: int = 0) -> Checks:
    """The first and newest tokens keep the weight 1, however large the keys after the first are."""
    tokens, size = subject.tokens, subject.sizes[1]
    k = np.array(tokens.k, np.float32)
    k[:, first:] *= HOSTILE
    hostile = tokens._replace(k=k.astype(tokens.k.dtype))
    state = subject.read_tokens(hostile, size).states[-1]
    held = cached(subject.policy, subject.spec, state)
    positions, weight = np.asarray(held.positions), np.asarray(held.log_weight)
    for sequence in range(BATCH - 1):
        valid = tokens.valid[sequence]
        numbers = tokens.positions[sequence][valid]
        needed = {int(n) for n in (*numbers[:first], *numbers[len(numbers) - newest :])}
        for head in range(subject.spec.kv_heads):
            there = set(positions[sequence, head][weight[sequence, head] == 0].tolist())
            missing = sorted(needed - there)
            yield f"adversarial keys evict the tokens at {missing} or change their weight", (
                not missing
            )


def _last_of_many(subject: Subject, one) -> Partial:
    """The attention of the last token of `one` [1,T,...], in MANY sequences."""
    policy, spec, count = subject.policy, subject.spec, one.q.shape[1]
    many = type(one)(*(np.broadcast_to(leaf, (MANY, *leaf.shape[1:])) for leaf in one))
    state = policy.reserve(spec, subject.init(MANY), count)
    # Without its output: XLA then drops the attention of the first tokens.
    absorb = jax.jit(lambda state, chunk: policy.update(spec, state, chunk)[1])
    state = absorb(state, cut(many, 0, count - 1))
    if subject.finishes:
        state = policy.reserve(spec, finish_prefill(policy, spec, state), 1)
    return update(policy, spec, state, cut(many, count - 1, count))[0]


def _numerator_and_denominator(
    subject: Subject, one
) -> tuple[Float[np.ndarray, "N H"], Float[np.ndarray, " N"]]:
    """Of the softmax of the last token of `one`, in plain numpy."""
    spec, group = subject.spec, one.q.shape[2] // subject.spec.kv_heads
    q, k = (rotate(spec, np.asarray(x, np.float64), one.positions)[0] for x in one[:2])
    k, v = (np.repeat(x, group, axis=1) for x in (k, np.asarray(one.v, np.float64)[0]))
    weights = np.exp(np.einsum("nh,tnh->nt", q[-1], k) * spec.scale)
    return np.einsum("nt,tnh->nh", weights, v), weights.sum(axis=1)
