"""The laws that notebooks ask: they find what is wrong, and nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.cache import ring
from jaxkv.evals import laws
from tests.seldom import seldom


@dataclasses.dataclass(frozen=True)
class Broken(jaxkv.Streaming):
    """A streaming cache with one mistake."""

    sinks: int = 2
    window: int = 6


class Greedy(Broken):
    def extend(self, spec, state, chunk):
        return super().extend(spec, state, chunk._replace(valid=jnp.ones_like(chunk.valid)))

    decode = property()  # so that `extend` is asked


class Counting(Broken):
    """Padding alone is left out, but not padding among tokens."""

    def extend(self, spec, state, chunk):
        some = jnp.any(chunk.valid, axis=1, keepdims=True) & jnp.ones_like(chunk.valid)
        return super().extend(spec, state, chunk._replace(valid=some))

    decode = property()


class Mixed(Broken):
    def attend(self, spec, state, chunk):
        return super().attend(spec, state, chunk._replace(q=chunk.q[::-1]))

    decode = property()


class Small(Broken):
    formula = "(sinks + window) * 2 * K * H * itemsize"


class Wide(Broken):
    def extend(self, spec, state, chunk):
        made = super().extend(spec, state, chunk)
        return made._replace(count=made.count.astype(jnp.float32))

    decode = property()


class Growing(Broken):
    """A chunk sees tokens that its own have driven out."""

    def attend(self, spec, state, chunk):
        return ring.attend(spec, state, chunk, self.sinks, None)


class Short(Broken):
    def attend(self, spec, state, chunk):
        return ring.attend(spec, state, chunk, self.sinks, self.window - 1)


class Crossed(Broken):
    def extend(self, spec, state, chunk):
        return super().extend(spec, state, chunk._replace(k=chunk.k[:, :, ::-1]))

    decode = property()


class Common(Broken):
    """A leaf that is not of rows."""

    axes = (ring.AXES, ("S",))

    def init(self, spec, rows, key):
        return super().init(spec, rows, key), jnp.zeros(3)

    def attend(self, spec, state, chunk):
        return super().attend(spec, state[0], chunk)

    def extend(self, spec, state, chunk):
        return super().extend(spec, state[0], chunk), state[1]

    decode = property()


class Unequal(Broken):
    __eq__, __hash__ = object.__eq__, object.__hash__


class Begun(Broken):
    def init(self, spec, rows, key):
        return super().init(spec, rows, key)._replace(count=jnp.ones(rows, jnp.int32))


class Forgetful(Broken):
    def decode(self, spec, state, chunk):
        return self.attend(spec, state, chunk), state


class Unlearning(Broken):
    def attend(self, spec, state, chunk):
        return super().attend(spec, state, jax.lax.stop_gradient(chunk))


def newest(count):
    """What a window of so many tokens means."""
    return lambda query: range(max(0, query + 1 - count), query + 1)


ASKED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16]
LAWS = {number: (number, says, law) for number, says, law in laws.LAWS}


@pytest.mark.parametrize("policy, capacity, view, asked", [
    ("window:window=6", 6, newest(6), sorted([*ASKED, 15])),
    seldom("streaming:sinks=2,window=6", 8, None, ASKED),
    seldom("reservoir:sinks=1,window=3,sample=4", 4, None, ASKED),
])  # fmt: skip
def test_those_of_the_library_keep_them(policy, capacity, view, asked):
    verdicts = laws.check(jaxkv.policy(policy), capacity, view)
    assert [v.number for v in verdicts] == asked
    assert all(v.holds for v in verdicts), laws.table(verdicts)


@pytest.mark.parametrize("policy, number", [
    (Wide(), 1), (Greedy(), 2), (Counting(), 2), (Mixed(), 3), (Short(), 4), (Growing(), 5),
    (Crossed(), 6), (Common(), 7), (Unequal(), 8), (Begun(), 9), (Forgetful(), 10), (Small(), 11),
    (Unlearning(), 16),
])  # fmt: skip
def test_a_mistake_is_found_by_its_law(policy, number):
    verdict = laws.judge(*LAWS[number], laws.Asked(policy, 8, laws.draw(29), None))
    assert verdict.number == number and not verdict.holds and verdict.why
    assert f"FAILS  {number:2}" in laws.table([verdict])


@pytest.mark.parametrize("meant, holds", [(6, True), (5, False)])
def test_what_a_policy_means_is_asked(meant, holds):
    asked = laws.Asked(jaxkv.Window(6), 6, laws.draw(23), newest(meant))
    verdict = laws.judge(*LAWS[15], asked)
    assert verdict.holds == holds and bool(verdict.why) != holds
