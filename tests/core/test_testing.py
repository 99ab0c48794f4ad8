"""`jaxkv.testing`: every policy of jaxkv keeps the laws, and each law finds its mistake."""

from __future__ import annotations

import dataclasses
import re
import traceback
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.attention import chunked_scan
from jaxkv.cache import ring
from jaxkv.errors import UserError
from jaxkv.testing import (
    LawError,
    check_law,
    check_laws,
    check_policy,
    check_protected,
    check_unbiased,
    check_wrap,
    make_subject,
    table,
)
from jaxkv.testing.laws import LAWS
from tests.core.broken_policies import BROKEN, Broken, WrongLetter


def newest(count):
    """The tokens that a window of this size caches."""
    return lambda query: range(max(0, query + 1 - count), query + 1)


def test_check_policy_finds_the_capacity_and_checks_every_law():
    numbers = {result.number for result in check_policy(jaxkv.Streaming(2, 5))}
    assert numbers >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 19} and 14 not in numbers


@pytest.mark.parametrize("policy, number, why", BROKEN)
def test_each_law_finds_its_mistake(unchecked, policy, number, why):
    laws = [law for law in LAWS if law[0] == number]
    subject = make_subject(policy, 8)
    broken = [v for law in laws if (v := check_law(law, subject)) and not v.holds]
    assert broken, f"law {number} does not find the mistake"
    assert any(re.search(why, result.reason) for result in broken), broken
    assert f"FAILS  {number:2}" in table(broken)


@pytest.mark.parametrize("size, holds", [(6, True), (5, False)])
def test_the_cached_tokens_of_a_policy_are_checked(size, holds):
    results = check_laws(jaxkv.Window(6), 6, newest(size))
    (result,) = [v for v in results if v.number == 15]
    assert result.holds == holds and bool(result.reason) != holds
    assert all(v.holds for v in results if v.number != 15)


def test_a_broken_policy_raises_with_the_law_and_the_leaf():
    with pytest.raises(LawError, match=r"law 11 .*leaf .k: axis H must be 8, got 3"):
        check_policy(WrongLetter())


class Raises(Broken):
    def update(self, spec, state, chunk):
        return self.of_this_policy(chunk)

    def of_this_policy(self, chunk):
        raise RuntimeError("no such slot\nand a second line")


def test_the_exception_of_a_policy_is_the_cause_of_the_law_error():
    with pytest.raises(LawError, match=r"law 1 .*: RuntimeError: no such slot$") as caught:
        check_policy(Raises())
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "of_this_policy" in "".join(traceback.format_exception(caught.value))
    assert [type(result.error) for result in check_laws(Raises())][-1] is RuntimeError


def test_an_unbiased_estimate_is_told_from_a_biased_one():
    sample = jaxkv.Reservoir(1, 2, 4, weighted=True, positions="absolute")
    check_unbiased(sample, 17)
    with pytest.raises(LawError, match=r"law 12 .*standard errors from that of full attention"):
        check_unbiased(dataclasses.replace(sample, exponent=0.5), 17)
    with pytest.raises(LawError, match=r"law 12 .*does not depend on the seed"):
        check_unbiased(jaxkv.Window(20), 17)


def test_protected_tokens_are_those_that_stay():
    check_protected(jaxkv.H2O(4, 3), first=0, newest=3)
    check_protected(jaxkv.Streaming(2, 5), first=2, newest=5)
    with pytest.raises(LawError, match=r"law 13 .*adversarial keys evict the tokens at \[0, 1\]"):
        check_protected(jaxkv.Window(7), first=2)
    with pytest.raises(LawError, match=r"law 13 .*adversarial keys evict"):
        check_protected(jaxkv.H2O(4, 3), first=2)


def test_an_object_that_is_not_a_policy_is_refused(unchecked):
    for check in (check_policy, check_unbiased, check_protected):
        with pytest.raises(UserError, match="a policy is a value"):
            check("streaming", 4)


@pytest.mark.parametrize(
    "check, arguments, rule",
    [
        (check_policy, {"capacity": 10**9}, "at most 2048, got 1"),
        (check_wrap, {"capacity": 10**9}, "at most 2048, got 1"),
        (check_laws, {"capacity": -1}, "at least 1, got -1"),
        (check_policy, {"capacity": 2.5}, "a whole number, got 2.5"),
        (check_unbiased, {"tokens": 10**9}, "at most 128, got 1"),
        (check_unbiased, {"tokens": 0}, "at least 2, got 0"),
        (check_protected, {"first": -1}, "at least 0, got -1"),
        (check_protected, {"first": 1, "newest": 0.5}, "a whole number, got 0.5"),
    ],
)
def test_sizes_that_no_check_suits_are_refused(unchecked, check, arguments, rule):
    with pytest.raises(UserError, match=f"{[*arguments][-1]} must be {rule}.*; use "):
        check(jaxkv.Window(6), **arguments)


def test_a_setting_that_is_too_large_to_check_is_refused():
    with pytest.raises(UserError, match=r"up to 2048 tokens.*from 5001; check it with"):
        check_policy(jaxkv.KeyDiff(capacity=5000))
    with pytest.raises(UserError, match=r"must leave other tokens of .*, got 3 and 1000000"):
        check_protected(jaxkv.Window(6), first=3, newest=10**6)


@pytest.mark.parametrize("name", ["init", "leaves", "frozen dataclass"])
def test_a_policy_without_a_member_breaks_law_1(name):
    members = ("init", "update", "cached", "leaves", "bytes_per_sequence")
    kept = {member: getattr(jaxkv.Window, member) for member in members if member != name}
    policy = type("Idle", (jaxkv.Policy,), kept | {"window": 6})
    if name in members:
        policy = dataclasses.dataclass(frozen=True)(policy)
    problem = f"it lacks `{name}`" if name in members else "it is not a frozen dataclass"
    with pytest.raises(LawError, match=rf"law 1 .*{problem}"):
        check_policy(policy())


@dataclasses.dataclass(frozen=True)
class AttendsFirst(jaxkv.Policy):
    """A window whose queries also see the token that their own token evicts."""

    window: int = 6
    leaves: ClassVar = ring.LEAVES

    def init(self, spec, batch, rng):
        return ring.init(spec, batch, self.window)

    def update(self, spec, state, chunk):
        return chunked_scan(partial(self.update_one, spec), state, chunk, 1)

    def update_one(self, spec, state, chunk):
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        stored = ring.cached(state).log_weight
        bias = jnp.where(chunk.valid[..., None], stored, -jnp.inf)[:, :, None, None]
        before = jaxkv.slot_attention(q, state.k, state.v, bias, spec.scale, spec.softcap)
        out = jaxkv.merge(before, jaxkv.local_attention(spec, chunk))
        return out, ring.write(spec, state, chunk)

    def cached(self, spec, state):
        return ring.cached(state)

    def bytes_per_sequence(self, spec, tokens=0):
        return ring.nbytes(spec, self.window)


@pytest.mark.parametrize("size, holds", [(6, True), (5, False)])
def test_a_policy_may_attend_before_it_evicts(size, holds):
    results = check_laws(AttendsFirst(6), 6, newest(size))
    assert {v.number: v.holds for v in results if v.number in (5, 15)} == {5: True, 15: holds}


class EveryFourth(AttendsFirst):
    """It caches the tokens at every fourth position."""

    def update_one(self, spec, state, chunk):
        out, _ = super().update_one(spec, state, chunk)
        return out, ring.write(spec, state, chunk._replace(valid=self.cached_of(state, chunk)))

    def cached_of(self, state, chunk):
        return chunk.valid & (chunk.positions % 4 == 0)


class EvictsNone(EveryFourth):
    """It caches no token once it is full."""

    def cached_of(self, state, chunk):
        return super().cached_of(state, chunk) & (state.count < self.window)[:, None]


@pytest.mark.parametrize("kind, holds", [(EveryFourth, True), (EvictsNone, False)])
def test_a_policy_that_skips_tokens_is_checked_beyond_its_first_eviction(kind, holds):
    cached_tokens = lambda query: range(0, query + 1, 4)[-4:]
    if holds:
        check_policy(kind(window=4), cached_tokens=cached_tokens)
    else:
        with pytest.raises(LawError, match="law 15"):
            check_policy(kind(window=4), cached_tokens=cached_tokens)


class Saturated(jaxkv.Window):
    """Its positions stop at 2^31."""

    def update(self, spec, state, chunk):
        positions = jnp.minimum(chunk.positions, jnp.uint32(2**31))
        return super().update(spec, state, chunk._replace(positions=positions))


def test_positions_that_do_not_wrap_are_found(unchecked):
    check_wrap(jaxkv.Window(window=5))
    with pytest.raises(LawError, match=r"law 18 .* from position 4294967291 in chunks of 1"):
        check_wrap(Saturated(window=5))
