"""Laws 12, 13 and 18, which do not hold for every policy."""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.contract import Chunk, Partial, Spec
from jaxkv.testing.subject import (
    BATCH,
    Checks,
    Subject,
    cached,
    cut,
    dense_logits,
    draw_tokens,
    finish_prefill,
    take_sequences,
    update,
)
from jaxkv.typing import Float

MANY = 4000  # sequences whose mean is compared with full attention
ERRORS = 4  # standard errors that the mean may be away
ROUNDING = 1e-6  # relative, of equal estimates
HOSTILE = 1e3  # factor of the keys after those that must stay


def estimates_are_unbiased(subject: Subject, tokens: int) -> Checks:
    """The last of `tokens` tokens, in sequences of one text that differ in their seeds only.

    The numerator and the denominator of its softmax must each be those of full attention in the
    mean. Their quotient, the output, is not unbiased.
    """
    text = take_sequences(draw_tokens(subject.spec, tokens, dtype=subject.tokens.q.dtype), [0])
    truths = _numerator_and_denominator(subject.spec, text)
    partial = _last_of_many(subject, text)
    out, lse = (np.asarray(leaf, np.float64)[:, 0] for leaf in partial)
    estimates = out * np.exp(lse)[..., None], np.exp(lse)
    for name, estimate, truth in zip(("numerator", "denominator"), estimates, truths, strict=True):
        spread = estimate.std(axis=0)
        varies = bool((spread > ROUNDING * np.abs(estimate).max(axis=0)).all())
        yield f"the {name} after {tokens} tokens does not depend on the seed", varies
        away = np.abs(estimate.mean(axis=0) - truth) / (spread / np.sqrt(MANY))
        yield (
            f"the mean {name} after {tokens} tokens is {away.max():.1f} standard errors from that "
            f"of full attention, and must be within {ERRORS}",
            bool(away.max() < ERRORS),
        )


def protected_tokens_stay(subject: Subject, first: int, newest: int = 0) -> Checks:
    """The first and newest tokens keep the weight 1, however large the keys after the first are."""
    tokens, size = subject.tokens, subject.sizes[1]
    state = subject.read_tokens(with_larger_keys(tokens, first), size).states[-1]
    held = cached(subject.policy, subject.spec, state)
    positions, weight = np.asarray(held.positions), np.asarray(held.log_weight)
    for sequence in range(BATCH - 1):
        valid = tokens.valid[sequence]
        numbers = tokens.positions[sequence][valid]
        needed = {int(n) for n in (*numbers[:first], *numbers[max(0, len(numbers) - newest) :])}
        for head in range(subject.spec.kv_heads):
            full_weight = set(positions[sequence, head][weight[sequence, head] == 0].tolist())
            missing = sorted(needed - full_weight)
            failure = f"adversarial keys evict the tokens at {missing}, or change their weight of 1"
            yield failure, not missing


def positions_may_wrap(subject: Subject) -> Checks:
    """The tokens again, from a position at which the middle of the prompt crosses 2^32."""
    first = 2**32 - subject.prompt // 2
    positions = ((subject.tokens.positions.astype(np.int64) + first) % 2**32).astype(np.uint32)
    moved = subject.tokens._replace(positions=positions)
    for size in subject.sizes[:2]:
        expected = subject.read(size).outs.astype(np.float64)
        actual = subject.read_tokens(moved, size).outs.astype(np.float64)
        away = np.abs(actual - expected).max(axis=(0, 2, 3))
        yield (
            f"from position {first} in chunks of {size}, the output of token {away.argmax()} "
            f"differs by {away.max():.2g} from that of the same tokens from position 0",
            bool(away.max() <= 10 * subject.tolerance),
        )


def with_larger_keys(tokens: Chunk, first: int) -> Chunk:
    """The tokens, of which those after the first have keys that outweigh all before them."""
    k = np.array(tokens.k, np.float32)
    k[:, first:] *= HOSTILE
    return tokens._replace(k=k.astype(tokens.k.dtype))


def _last_of_many(subject: Subject, text: Chunk) -> Partial:
    """The attention of the last token of `text` [1,T,...], in MANY sequences."""
    policy, spec, count = subject.policy, subject.spec, text.q.shape[1]
    many = Chunk(*(np.broadcast_to(leaf, (MANY, *leaf.shape[1:])) for leaf in text))
    state = policy.reserve(spec, subject.init(MANY), count)
    # Without its output: XLA then drops the attention of the first tokens.
    absorb = jax.jit(lambda state, chunk: policy.update(spec, state, chunk)[1])
    state = absorb(state, cut(many, 0, count - 1))
    if subject.finishes:
        state = policy.reserve(spec, finish_prefill(policy, spec, state), 1)
    return update(policy, spec, state, cut(many, count - 1, count))[0]


def _numerator_and_denominator(
    spec: Spec, text: Chunk
) -> tuple[Float[np.ndarray, "N H"], Float[np.ndarray, " N"]]:
    """Both parts of the softmax of the last token of `text` [1,T,...], in plain numpy."""
    weights = np.exp(dense_logits(spec, text)[0, :, -1])
    v = np.repeat(np.asarray(text.v, np.float64)[0], text.q.shape[2] // spec.kv_heads, axis=1)
    return np.einsum("nt,tnh->nh", weights, v), weights.sum(axis=1)
