"""The laws of a cache policy as public functions, for tests, notebooks and policies of your own.

    from jaxkv.testing import check_policy
    check_policy(MyPolicy())          # raises LawError, which names each broken law and why

Each law runs on random tokens, past three times the capacity of the policy, and compares with plain
numpy or with the policy itself in another arrangement. The numbers are those of jaxkv/contract.py.

Three laws do not hold for every policy, so they have functions of their own:

    check_unbiased(MyPolicy(), tokens=17)    # law 12: the estimate after 17 tokens is unbiased
    check_protected(MyPolicy(), first=4)     # law 13: the first 4 tokens stay, whatever the keys
    check_wrap(MyPolicy())                   # law 18: positions may wrap at 2^32
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax

from jaxkv.arguments import check_is_policy
from jaxkv.contract import Policy
from jaxkv.errors import UserError, check_int
from jaxkv.testing.estimates import (
    estimates_are_unbiased,
    positions_may_wrap,
    protected_tokens_stay,
)
from jaxkv.testing.laws import LAWS, Law
from jaxkv.testing.subject import (
    MAX_CAPACITY,
    SPEC,
    CachedTokens,
    Subject,
    draw_tokens,
    find_capacity,
    find_eviction,
)

__all__ = [
    "LawError",
    "LawResult",
    "check_law",
    "check_laws",
    "check_policy",
    "check_protected",
    "check_unbiased",
    "check_wrap",
    "make_subject",
    "table",
]

# One law attends from twice as many queries to three times as many keys: in four sequences of six
# heads these are 2.4 GB of logits.
MAX_CHECKED = 2048
MAX_UNBIASED = 128  # tokens of each of 4,000 sequences: up to 1.6 GB of logits

NOT_JITTABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class LawError(AssertionError):
    """A policy breaks at least one law."""


class LawResult(NamedTuple):
    """The check of one law.

    reason: what was found if the law does not hold. error: the exception, if the policy raised one.
    """

    number: int
    statement: str
    holds: bool
    reason: str = ""
    error: Exception | None = None


def check_policy(
    policy: Policy,
    capacity: int | None = None,
    cached_tokens: CachedTokens | None = None,
) -> list[LawResult]:
    """Check every law that applies to a policy. Returns one result per check.

    capacity: the policy evicts none of its first `capacity` tokens, at most MAX_CHECKED; None finds
    it out, up to 512, or takes the prompt from which the policy compresses.
    cached_tokens: the meaning of the policy in plain Python, for law 15: from the number of a
    query's token to the numbers of all cached tokens, each of weight one and at its position in the
    text.
    Raises LawError, which names each broken law, the leaf and what was expected, from the first
    exception of the policy, if it raised any; UserError for a value that is no policy, and for
    another capacity.
    """
    results = check_laws(policy, capacity, cached_tokens)
    _raise_broken(policy, results)
    return results


def check_unbiased(policy: Policy, tokens: int) -> None:
    """Raise LawError unless the estimate after `tokens` tokens is unbiased over seeds (law 12).

    An exact policy fails too: it has no draws, so its estimates do not vary. tokens: from 2 to
    MAX_UNBIASED.
    """
    check_is_policy(policy)
    check_int("tokens", tokens, 2, MAX_UNBIASED)
    check = partial(estimates_are_unbiased, tokens=tokens)
    law = 12, "the estimate is unbiased", check
    _raise_broken(policy, [check_law(law, make_subject(policy, 1))])


def check_protected(policy: Policy, first: int, newest: int = 0) -> None:
    """Raise LawError unless adversarial keys leave the first and newest tokens (law 13).

    first, newest: how many tokens must stay cached with the weight 1, together fewer than the
    check reads: three times what the policy caches without evicting one.
    """
    check_is_policy(policy)
    check_int("first", first, 0)
    check_int("newest", newest, 0)
    subject = _subject_of(policy)
    if first + newest >= subject.count:
        raise UserError(
            f"first and newest must leave other tokens of the {subject.count} that are read, got "
            f"{first} and {newest}; give fewer"
        )
    check = partial(protected_tokens_stay, first=first, newest=newest)
    law = 13, "the first and newest tokens stay cached", check
    _raise_broken(policy, [check_law(law, subject)])


def check_wrap(policy: Policy, capacity: int | None = None) -> None:
    """Raise LawError unless the output is the same where positions wrap at 2^32 (law 18).

    For policies that choose tokens by neither the absolute position nor the rotated key. Those that
    draw by the position choose others after it moves. capacity: as in `check_policy`.
    """
    check_is_policy(policy)
    law = 18, "the output does not depend on where positions begin", positions_may_wrap
    _raise_broken(policy, [check_law(law, _subject_of(policy, capacity))])


def _raise_broken(policy: Policy, results: Sequence[LawResult | None]) -> None:
    """Raise LawError if a law does not hold, from the first exception of the policy."""
    broken = [result for result in results if result and not result.holds]
    if broken:
        lines = [f"law {r.number} ({r.statement}): {r.reason}" for r in broken]
        cause = next((r.error for r in broken if r.error), None)
        raise LawError(f"{policy!r} breaks laws:\n" + "\n".join(lines)) from cause


def check_laws(
    policy: Policy,
    capacity: int | None = None,
    cached_tokens: CachedTokens | None = None,
) -> list[LawResult]:
    """The results of `check_policy`, also if laws are broken."""
    check_is_policy(policy)
    if capacity is not None:
        check_int("capacity", capacity, maximum=MAX_CHECKED)
    of_one, first = make_subject(policy, 1, cached_tokens), []
    for law in LAWS[:3]:
        first.append(check_law(law, of_one))
        if not first[-1].holds:
            return first  # the others would fail for this reason
    subject = _subject_of(policy, capacity, cached_tokens)
    results = (check_law(law, subject) for law in LAWS)
    return [result for result in results if result]


def _subject_of(
    policy: Policy, capacity: int | None = None, cached_tokens: CachedTokens | None = None
) -> Subject:
    of_one = make_subject(policy, 1)
    if capacity is None and policy.grows and (policy.min_prompt or 0) > MAX_CHECKED:
        raise UserError(
            f"the laws are checked on prompts of up to {MAX_CHECKED} tokens, and the policy "
            f"compresses from {policy.min_prompt}; check it with a smaller setting"
        )
    capacity = find_capacity(of_one) if capacity is None else capacity
    evicts = 0 if policy.grows or capacity == MAX_CAPACITY else find_eviction(of_one)
    return make_subject(policy, capacity, cached_tokens, evicts)


def make_subject(
    policy: Policy,
    capacity: int,
    cached_tokens: CachedTokens | None = None,
    evicts: int = 0,
) -> Subject:
    """The policy with three times the tokens of its capacity, or of its first eviction, and more.

    evicts: the tokens until the first eviction, where a policy skips tokens before.
    """
    check_int("capacity", capacity, maximum=MAX_CHECKED)
    limit = max(capacity, evicts)
    tokens, sizes = draw_tokens(SPEC, 3 * limit + 5), (1, 5, max(6, 2 * limit + 1))
    return Subject(policy, capacity, tokens, sizes, SPEC, cached_tokens)


def table(results: Sequence[LawResult]) -> str:
    """One line per law."""
    lines = []
    for r in results:
        lines.append(f"{'holds' if r.holds else 'FAILS'}  {r.number:2}  {r.statement}")
        lines += [f"           {r.reason}"] if r.reason else []
    return "\n".join(lines)


def check_law(law: tuple[int, str, Law], subject: Subject) -> LawResult | None:
    """Run the checks of a law up to the first that fails. Returns None if the law has none.

    An exception is a failure too.
    """
    number, statement, checks = law
    checked = False
    try:
        for failure, passes in checks(subject):
            checked = True
            if not passes:
                return LawResult(number, statement, False, failure)
    except Exception as error:  # a policy of somebody else's may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if isinstance(error, NOT_JITTABLE):
            reason = f"it must be jittable, so use jnp.where in place of a branch; {reason}"
        return LawResult(number, statement, False, reason, error)
    return LawResult(number, statement, True) if checked else None
