"""Policies with one mistake each, for the tests of the laws."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.cache import ring
from jaxkv.cache.ring import RingSettings
from jaxkv.contract import Leaf


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
        valid_if_any = jnp.any(chunk.valid, axis=1, keepdims=True) & jnp.ones_like(chunk.valid)
        partial, _ = super().update(spec, state, chunk)
        return partial, super().update(spec, state, chunk._replace(valid=valid_if_any))[1]


class SharesBuffers(Broken):
    """Keys and values begin as one array."""

    def init(self, spec, batch, rng):
        state = super().init(spec, batch, rng)
        return state._replace(v=state.k)


class SharesBuffersLater(jaxkv.Uniform):
    """Keys and values of the compressed prompt are one array."""

    def finish_prefill(self, spec, state):
        state = super().finish_prefill(spec, state)
        return state._replace(sample=state.sample._replace(v=state.sample.k))


class MixesSequences(Broken):
    """The output of a sequence uses the queries of another."""

    def update(self, spec, state, chunk):
        return super().update(spec, state, chunk._replace(q=chunk.q[::-1]))


class OtherProgram(Broken):
    """The program of a layer is that of another policy."""

    @property
    def program(self):
        return MixesSequences()


class TooFewBytes(Broken):
    def bytes_per_sequence(self, spec, tokens=0):
        return (self.sinks + self.window) * 2 * spec.kv_heads * spec.head_dim * 4


class OtherDtype(Broken):
    """The returned state has another dtype."""

    def update(self, spec, state, chunk):
        partial, new_state = super().update(spec, state, chunk)
        return partial, new_state._replace(count=new_state.count.astype(jnp.float32))


class SeesEvicted(Broken):
    """A query of a chunk sees tokens that the chunk has evicted."""

    def update(self, spec, state, chunk):
        partial = ring.attend(spec, state, chunk, RingSettings(self.sinks))
        return partial, ring.write(spec, state, chunk, RingSettings(self.sinks))


class ShortWindow(Broken):
    """The window is one token too short."""

    def update(self, spec, state, chunk):
        partial = ring.attend(spec, state, chunk, RingSettings(self.sinks, self.window - 1))
        return partial, ring.write(spec, state, chunk, RingSettings(self.sinks))


class IgnoresSoftcap(Broken):
    def update(self, spec, state, chunk):
        return super().update(dataclasses.replace(spec, softcap=None), state, chunk)


class IgnoresPenalty(Broken):
    """Keys are attended as if the encoding had no distance penalty."""

    def update(self, spec, state, chunk):
        if isinstance(spec.encoding, jaxkv.Alibi):
            spec = dataclasses.replace(spec, encoding=jaxkv.NoPosition())
        return super().update(spec, state, chunk)


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


class WrongPositions(Broken):
    """`cached` gives positions that are one too large."""

    def cached(self, spec, state):
        cached_tokens = super().cached(spec, state)
        return cached_tokens._replace(positions=cached_tokens.positions + 1)


class QueryLetter(Broken):
    leaves: ClassVar = ring.LEAVES._replace(k=Leaf("B N S H"))


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


@dataclasses.dataclass(frozen=True)
class BrokenCompression(jaxkv.SnapKV):
    """A prompt compression with one mistake."""

    capacity: int = 8
    window: int = 4


class CompressesAnother(BrokenCompression):
    """The end of prefill gives a sequence the prompt of another."""

    def finish_prefill(self, spec, state):
        return jax.tree.map(lambda a: a[::-1], super().finish_prefill(spec, state))


class InfiniteGradient(BrokenCompression):
    """The end of prefill has no finite derivative."""

    def finish_prefill(self, spec, state):
        finished = super().finish_prefill(spec, state)
        return finished._replace(sample=jax.tree.map(rooted, finished.sample))


def rooted(array):
    """The same array; the derivative at 0 of the root is infinite."""
    return array + jnp.sqrt(array * 0) if array.dtype == jnp.float32 else array


class Shrinks(Broken):
    """Keys in int8 become smaller with each token."""

    def update(self, spec, state, chunk):
        partial, new_state = super().update(spec, state, chunk)
        return partial, new_state._replace(k=new_state.k._replace(scale=new_state.k.scale * 0.99))


class LatePages(jaxkv.BalanceStream):
    """A page changes later than it says."""

    @property
    def leaves(self):
        def late(leaf):
            if not leaf.page:
                return leaf
            said = leaf.page.last_write
            page = dataclasses.replace(leaf.page, last_write=lambda seen: said(max(seen - 1, 0)))
            return dataclasses.replace(leaf, page=page)

        return jax.tree.map(late, super().leaves)


class DropsTokens(Broken):
    """The log-sum-exp has no token axis."""

    def update(self, spec, state, chunk):
        partial, new_state = super().update(spec, state, chunk)
        return partial._replace(lse=partial.lse[:, 0]), new_state


class CachesNothing(Broken):
    def cached(self, spec, state):
        return None


class Branches(Broken):
    """A branch on a value that is unknown under jit."""

    def update(self, spec, state, chunk):
        if chunk.valid.any():
            return super().update(spec, state, chunk)
        return super().update(spec, state, chunk._replace(q=chunk.q * 0))


class NoLeaf(Broken):
    leaves: ClassVar = ring.LEAVES._replace(k="B K S H")


# A broken policy, the number of the law, and a pattern of the reason that is reported.
BROKEN = [
    (CompressesAnother(), 14, "depends on"), (InfiniteGradient(), 16, "through finish_prefill"),
    (Shrinks(storage="int8"), 17, "a row of k is not its token's"),
    (LatePages(sinks=1, window=3, levels=2, block=4), 11, "last_write must be"),
    (DropsTokens(), 1, r"must return lse \[B,T,N\] as \(\(4, 1, 6\), 'float32'\), got \(\(4, 6\)"),
    (CachesNothing(), 1, "cached must return a Cached, got a NoneType"),
    (Branches(), 1, "must be jittable, so use jnp.where"), (NoLeaf(), 11, "a Leaf per array"),
    (OtherDtype(), 1, r"must return .count as \(\(4,\), 'int32'\), got \(\(4,\), 'float32'\)"),
    (WrongLetter(), 11, r"leaf .k: axis H must be 8, got 3"),
    (TooFewLetters(), 11, r"leaf .k: axes 'B K S' for an array of"),
    (CachesPadding(), 2, "padding"), (CachesInnerPadding(), 2, "padding"),
    (MixesSequences(), 3, "sequence 0"), (ShortWindow(), 4, "chunks of 1"),
    (IgnoresSoftcap(), 4, "a softcap"), (IgnoresPenalty(), 4, "under ALiBi"),
    (SeesEvicted(), 5, "chunks of 5"), (SwapsHeads(), 6, "KV head 0"),
    (Unequal(), 8, "hash alike"), (NotEmpty(), 9, "empty state"),
    (OtherProgram(), 8, "`program` gives other bits"), (TooFewBytes(), 10,
     r"bytes_per_sequence\(spec, 0\) must be 1572, as the arrays have; got 1536"),
    (WrongPositions(), 4, r"after 1 tokens `cached` must give positions \[0\], got \[1\]"),
    (QueryLetter(), 11, "leaf .k: T and N are axes of queries"),
    (Unshared(), 11, "leaf .k is shared but"), (Overwriting(), 11, "leaf .v is append-only"),
    (NoGradient(), 16, "no finite gradient"),
    (SharesBuffers(), 19, "an initial state: leaves .k and .v share a buffer"),
    (SharesBuffersLater(1, 3, 2, start=16), 19, "finish_prefill: leaves .sample.k and .sample.v"),
]  # fmt: skip
