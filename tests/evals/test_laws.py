"""The laws that notebooks ask: they find what is wrong, and nothing else."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

import jaxkv
from evals import laws
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


@pytest.mark.parametrize("policy, capacity", [
    ("streaming:sinks=2,window=6", 8),
    ("window:window=6", 6),
    seldom("reservoir:sinks=1,window=3,sample=4", 4),
])  # fmt: skip
def test_those_of_the_library_keep_them(policy, capacity):
    verdicts = laws.check(jaxkv.policy(policy), capacity)
    assert [v.number for v in verdicts] == [1, 2, 3, 4, 5, 9, 11]
    assert all(v.holds for v in verdicts), laws.table(verdicts)


@pytest.mark.parametrize(
    "policy, number", [(Greedy(), 2), (Counting(), 2), (Mixed(), 3), (Small(), 11), (Wide(), 1)]
)
def test_a_mistake_is_found_by_its_law(policy, number):
    verdicts = {v.number: v for v in laws.check(policy, 8)}
    assert not verdicts[number].holds and verdicts[number].why
    assert f"FAILS  {number:2}" in laws.table(list(verdicts.values()))
