"""The laws of a cache policy as public functions, for tests, notebooks and policies of your own.

    from jaxkv.testing import check_policy
    check_policy(MyPolicy())          # raises LawError, which names each broken law and why

Each law runs on random tokens, past three times the capacity of the policy, and compares with plain
numpy or with the policy itself in another arrangement. The numbers are those of jaxkv/contract.py.
Statistical laws (12, 13) need settings of their own; tests/laws has them for the policies here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.contract import Policy, check_is_policy
from jaxkv.testing.laws import LAWS, Law
from jaxkv.testing.subject import SPEC, CachedTokens, Subject, draw_tokens, find_capacity

__all__ = [
    "LawError",
    "Verdict",
    "check_policy",
    "judge_law",
    "judge_laws",
    "make_subject",
    "table",
]


class LawError(AssertionError):
    """A policy breaks at least one law."""


class Verdict(NamedTuple):
    """One law; why: what was found where it does not hold."""

    number: int
    says: str
    holds: bool
    why: str = ""


def check_policy(
    policy: Policy,
    capacity: int | None = None,
    cached_tokens: CachedTokens | None = None,
) -> list[Verdict]:
    """Check every law that applies to a policy; the verdicts.

    capacity: the policy evicts none of its first `capacity` tokens; None finds it out, up to 512.
    cached_tokens: the meaning of the policy in plain Python, for law 15: from the number of a
    query's token to the numbers of all cached tokens, each of weight one and at its position in the
    text.
    Raises LawError, which names each broken law, the leaf and what was expected; UserError for a
    value that is no policy.
    """
    check_is_policy(policy)
    verdicts = judge_laws(policy, capacity, cached_tokens)
    broken = [v for v in verdicts if not v.holds]
    if broken:
        lines = [f"law {v.number} ({v.says}): {v.why}" for v in broken]
        raise LawError(f"{policy!r} breaks {len(broken)} law(s)\n" + "\n".join(lines))
    return verdicts


def judge_laws(
    policy: Policy,
    capacity: int | None = None,
    cached_tokens: CachedTokens | None = None,
) -> list[Verdict]:
    """The verdicts of `check_policy`, also where laws are broken."""
    probe = make_subject(policy, 1, cached_tokens)
    first = [judge_law(law, probe) for law in LAWS[:3]]
    if not all(verdict.holds for verdict in first if verdict):
        return [verdict for verdict in first if verdict]  # the others would fail for this reason
    capacity = find_capacity(probe) if capacity is None else capacity
    subject = make_subject(policy, capacity, cached_tokens)
    verdicts = (judge_law(law, subject) for law in LAWS)
    return [verdict for verdict in verdicts if verdict]


def make_subject(
    policy: Policy,
    capacity: int,
    cached_tokens: CachedTokens | None = None,
) -> Subject:
    """The policy with tokens past three times its capacity."""
    tokens, sizes = draw_tokens(SPEC, 3 * capacity + 5), (1, 5, max(6, 2 * capacity + 1))
    return Subject(policy, capacity, tokens, sizes, SPEC, cached_tokens)


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per law."""
    lines = []
    for v in verdicts:
        lines.append(f"{'holds' if v.holds else 'FAILS'}  {v.number:2}  {v.says}")
        lines += [f"           {v.why}"] if v.why else []
    return "\n".join(lines)


def judge_law(law: tuple[int, str, Law], subject: Subject) -> Verdict | None:
    """The first check of a law that fails; None where the law has none; an exception fails too."""
    number, says, checks = law
    checked = False
    try:
        for what, passes in checks(subject):
            checked = True
            if not passes:
                return Verdict(number, says, False, what)
    except Exception as error:  # a policy of somebody else's may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Verdict(number, says, False, why)
    return Verdict(number, says, True) if checked else None
