"""`jaxkv.testing`: every policy of jaxkv keeps the laws, and each law finds its mistake."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.cache import ring
from jaxkv.contract import Leaf
from jaxkv.errors import UserError
from jaxkv.testing import LawError, check_law, check_laws, check_policy, make_subject, table
from jaxkv.testing.laws import LAWS
from tests.seldom import seldom


def newest(count):
    """The tokens that a window of this size caches."""
    return lambda query: range(max(0, query + 1 - count), query + 1)


@pytest.mark.parametrize("policy", [
    jaxkv.Streaming(2, 5), seldom(jaxkv.policy("balance:sinks=2,window=3,block=8,start=16")),
])  # fmt: skip
def test_check_policy_finds_the_capacity_and_checks_every_law(policy):
    numbers = {result.number for result in check_policy(policy)}
    assert numbers >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16}
    assert (14 in numbers) == (policy.min_prompt is not None)


@dataclasses.dataclass(frozen=True)
class Broken(jaxkv.Streaming):
    """A streaming cache with one mistake."""

    sinks: int = 2
    window: int = 6


class CachesPadding(Broken):
    """Padding is cached."""

    def update(self, spec, state, chunk):
        return super().update(spec, state, chunk._replace(valid=jnp.ones_like(chunk.valid)))


class CachesInnerPadding(Broken):
    """Padding is cached, except in chunks without tokens."""

    def update(self, spec, state, chunk):
        some = jnp.any(chunk.valid, axis=1, keepdims=True) & jnp.ones_like(chunk.valid)
        partial, _ = super().update(spec, state, chunk)
        return partial, super().update(spec, state, chunk._replace(valid=some))[1]


class MixesSequences(Broken):
    """The output of a sequence uses the queries of another."""

    def update(self, spec, state, chunk):
        return super().update(spec, state, chunk._replace(q=chunk.q[::-1]))


class TooFewBytes(Broken):
    def bytes_per_sequence(self, spec, tokens=0):
        return (self.sinks + self.window) * 2 * spec.kv_heads * spec.head_dim * 4


class OtherDtype(Broken):
    """The returned state has another dtype."""

    def update(self, spec, state, chunk):
        partial, made = super().update(spec, state, chunk)
        return partial, made._replace(count=made.count.astype(jnp.float32))


class SeesEvicted(Broken):
    """A query of a chunk sees tokens that the chunk has evicted."""

    def update(self, spec, state, chunk):
        partial = ring.attend(spec, state, chunk, self.sinks, None)
        return partial, ring.write(spec, state, chunk, self.sinks)


class ShortWindow(Broken):
    """The window is one token too short."""

    def update(self, spec, state, chunk):
        partial = ring.attend(spec, state, chunk, self.sinks, self.window - 1)
        return partial, ring.write(spec, state, chunk, self.sinks)


class SwapsHeads(Broken):
    """KV heads store each other's keys."""

    def update(self, spec, state, chunk):
        return super().update(spec, state, chunk._replace(k=chunk.k[:, :, ::-1]))


class Unequal(Broken):
    __eq__, __hash__ = object.__eq__, object.__hash__


class NotEmpty(Broken):
    def init(self, spec, batch, rng):
        return super().init(spec, batch, rng)._replace(count=jnp.ones(batch, jnp.int32))


class NoGradient(Broken):
    def update(self, spec, state, chunk):
        return super().update(spec, state, jax.lax.stop_gradient(chunk))


class Unshared(Broken):
    """The keys are declared equal in all layers."""

    leaves: ClassVar = ring.LEAVES._replace(k=Leaf("B K S H", shared=True))


class Overwriting(Broken):
    """A ring is declared append-only."""

    leaves: ClassVar = ring.LEAVES._replace(v=Leaf("B K S H", append_only=True))


class WrongLetter(Broken):
    leaves: ClassVar = ring.LEAVES._replace(k=Leaf("B H S K"))


class TooFewLetters(Broken):
    leaves: ClassVar = ring.LEAVES._replace(k=Leaf("B K S"))


class OtherStructure(Broken):
    def update(self, spec, state, chunk):
        partial, made = super().update(spec, state, chunk)
        return partial, (made, made.count)


@pytest.mark.parametrize("policy, number, why", [
    (OtherDtype(), 1, r"must return .count as \(\(4,\), 'int32'\), got \(\(4,\), 'float32'\)"),
    (OtherStructure(), 1, r"the arrays .k, .v, .positions, .count, got \[0\].k"),
    (WrongLetter(), 11, r"leaf .k: axis H must be 8, got 3"),
    (TooFewLetters(), 11, r"leaf .k: axes 'B K S' for 4 axes"),
    (CachesPadding(), 2, "padding"), (CachesInnerPadding(), 2, "padding"),
    (MixesSequences(), 3, "sequence 0"), (ShortWindow(), 4, "chunks of 1"),
    (SeesEvicted(), 5, "chunks of 5"), (SwapsHeads(), 6, "KV head 0"),
    (Unequal(), 8, "hash alike"), (NotEmpty(), 9, "empty state"),
    (TooFewBytes(), 10,
     r"bytes_per_sequence\(spec, 0\) must be 1572, as the arrays have; got 1536"),
    (Unshared(), 11, "leaf .k is shared but"), (Overwriting(), 11, "leaf .v is append-only"),
    (NoGradient(), 16, "no finite gradient"),
])  # fmt: skip
def test_each_law_finds_its_mistake(policy, number, why):
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


class Idle(jaxkv.Policy):
    """A policy without `update`."""

    init, leaves = Broken.init, ring.LEAVES
    sinks, window = 2, 6


def test_a_policy_without_update_breaks_law_1():
    with pytest.raises(LawError, match=r"law 1 .*it lacks `update`"):
        check_policy(Idle())


class Old:
    """A policy of the contract before `update`."""

    def attend(self, spec, state, chunk): ...

    def extend(self, spec, state, chunk): ...


def test_a_policy_of_the_old_contract_is_refused(unchecked):
    with pytest.raises(UserError, match="rename attend to update, extend to update"):
        check_policy(Old())
    with pytest.raises(UserError, match="rename attend to update, extend to update"):
        type("Older", (jaxkv.Policy,), {"attend": Old.attend, "extend": Old.extend})


def test_an_object_that_is_not_a_policy_is_refused(unchecked):
    with pytest.raises(UserError, match="a policy is a value"):
        check_policy("streaming")
