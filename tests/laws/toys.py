"""Two small policies that prove the contract carries what is to come.

`Halving` compresses a finished prompt once, in `seal`, and changes shape as it does so; BalanceKV
as published, SnapKV and MagicPIG are of its kind. `Sampling` forgets as it goes and keeps a
weighted sample of what it forgets, drawn anew for each row and kv head; reservoirs are of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import slots
from jaxkv.attention import merge, slot_attention
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.slots import Slots


def sampled_attention(spec, chunk, k, v, positions, log_weight) -> Partial:
    """Attention over slots k, v [B,K,S,H], keys turned to their place in the text."""
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    bias = jnp.where(chunk.valid[:, None, None, :, None], log_weight[:, :, None, None], -jnp.inf)
    penalty = spec.encoding.bias(chunk.positions, positions, k.shape[1])
    bias = bias if penalty is None else bias + penalty
    return slot_attention(q, k, v, bias, spec.scale, spec.softcap)


class HalvedState(NamedTuple):
    prompt: Slots
    tail: Slots  # no slots until the prompt is sealed


@dataclass(frozen=True)
class Halving:
    """Exact until `seal`; then the first `sinks` tokens of the prompt and every second other one.

    What is generated is kept exactly, in `tail` slots at first.
    """

    sinks: int = 2
    start: int = 8
    tail: int = 4

    formula: ClassVar[str] = "start * (2 * K * H * itemsize + 4) + 8"
    axes: ClassVar[HalvedState] = HalvedState(slots.AXES, slots.AXES)

    def init(self, spec: Spec, rows: int, key: jax.Array) -> HalvedState:
        return HalvedState(slots.init(spec, rows, self.start), slots.init(spec, rows, 0))

    def reserve(self, spec: Spec, state: HalvedState, tokens: int) -> HalvedState:
        """Room for `tokens` in the prompt, or once it is sealed behind it."""
        name = "tail" if _sealed(state) else "prompt"
        part = getattr(state, name)
        size = part.positions.shape[1]
        while size < tokens:
            size *= 2
        return state._replace(**{name: slots.grow(part, size)})

    def attend(self, spec: Spec, state: HalvedState, chunk: Chunk) -> Partial:
        if not _sealed(state):
            return slots.attend(state.prompt, spec, chunk, sinks=0, window=None)
        held = slots.kept(state.prompt)
        prompt = sampled_attention(spec, chunk, state.prompt.k, state.prompt.v, *held)
        return merge(prompt, slots.attend(state.tail, spec, chunk, sinks=0, window=None))

    def extend(self, spec: Spec, state: HalvedState, chunk: Chunk) -> HalvedState:
        name = "tail" if _sealed(state) else "prompt"
        part = slots.extend(getattr(state, name), spec, chunk, sinks=0, ring=False)
        return state._replace(**{name: part})

    def seal(self, spec: Spec, state: HalvedState) -> HalvedState:
        prompt = state.prompt
        rows, size = prompt.positions.shape
        chosen = np.r_[0 : self.sinks, self.sinks : size : 2]
        held = jnp.sum((chosen[None, :] < prompt.count[:, None]).astype(jnp.int32), axis=1)
        halved = Slots(
            prompt.k[:, :, chosen], prompt.v[:, :, chosen], prompt.positions[:, chosen], held
        )
        return HalvedState(halved, slots.init(spec, rows, self.tail))

    def kept(self, spec: Spec, state: HalvedState) -> Kept:
        parts = zip(slots.kept(state.prompt), slots.kept(state.tail), strict=True)
        return Kept(*(jnp.concatenate(leaves, axis=2) for leaves in parts))


def _sealed(state: HalvedState) -> bool:
    return state.tail.positions.shape[1] > 0


class SampledState(NamedTuple):
    recent: Slots
    k: jax.Array
    v: jax.Array
    positions: jax.Array
    middle: jax.Array  # how many tokens lie between sinks and window
    key: jax.Array


@dataclass(frozen=True)
class Sampling:
    """Sinks and window exactly; of the tokens between, a uniform sample weighted to stand for all.

    The sample is the `sample` tokens of lowest priority, a hash of (key, position): it does not
    depend on the order or grouping in which they came.
    """

    sinks: int = 2
    window: int = 4
    sample: int = 3

    formula: ClassVar[str] = (
        "(sinks + window) * (2 * K * H * itemsize + 4) + 4"
        " + K * sample * (2 * H * itemsize + 4) + 4 + 8 * K"
    )
    axes: ClassVar[SampledState] = SampledState(
        recent=slots.AXES,
        k=("B", "K", "S", "H"),
        v=("B", "K", "S", "H"),
        positions=("B", "K", "S"),
        middle=("B",),
        key=("B", "K", "2"),
    )

    def init(self, spec: Spec, rows: int, key: jax.Array) -> SampledState:
        shape = (rows, spec.kv_heads, self.sample)
        zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return SampledState(
            recent=slots.init(spec, rows, self.sinks + self.window),
            k=zeros,
            v=zeros,
            positions=jnp.zeros(shape, jnp.uint32),
            middle=jnp.zeros(rows, jnp.int32),
            key=jax.random.bits(key, (rows, spec.kv_heads, 2), jnp.uint32),
        )

    def attend(self, spec: Spec, state: SampledState, chunk: Chunk) -> Partial:
        weight = self._log_weight(state)
        sample = sampled_attention(spec, chunk, state.k, state.v, state.positions, weight)
        # No window: a token that leaves it inside the chunk has had no chance to be sampled yet.
        recent = slots.attend(state.recent, spec, chunk, self.sinks, None, by_rank=False)
        return merge(sample, recent)

    def extend(self, spec: Spec, state: SampledState, chunk: Chunk) -> SampledState:
        recent, kv_heads = state.recent, state.k.shape[1]
        new = jnp.cumsum(chunk.valid.astype(jnp.int32), axis=1)
        numbers = slots.number(recent, chunk.valid)
        behind = new[:, -1:] - new
        passing = (numbers >= self.sinks) & (behind >= self.window)
        age = (recent.count[:, None] - 1 - jnp.arange(self.window)[None] - self.sinks) % self.window
        held = jnp.arange(self.window)[None] + self.sinks < recent.count[:, None]
        leaving = held & (age + new[:, -1:] >= self.window)

        def all_heads(x):
            return jnp.broadcast_to(x[:, None], (x.shape[0], kv_heads, *x.shape[1:]))

        keys = spec.encoding.rotate(chunk.k, chunk.positions).astype(state.k.dtype)
        values = chunk.v.astype(state.v.dtype)
        k, v = (
            jnp.concatenate([old, ring[:, :, self.sinks :], fresh.transpose(0, 2, 1, 3)], axis=2)
            for old, ring, fresh in ((state.k, recent.k, keys), (state.v, recent.v, values))
        )
        came = jnp.concatenate([recent.positions[:, self.sinks :], chunk.positions], axis=1)
        positions = jnp.concatenate([state.positions, all_heads(came)], axis=2)
        runs = jnp.concatenate([self._held(state), all_heads(leaving), all_heads(passing)], axis=2)
        drawn = jnp.where(runs, priority(positions, state.key), np.uint32(2**32 - 1))
        best = jnp.argsort(drawn, axis=2, stable=True)[:, :, : self.sample]
        left = jnp.sum(leaving, axis=1, dtype=jnp.int32) + jnp.sum(passing, axis=1, dtype=jnp.int32)
        settled = (left == 0)[:, None, None]  # an unchanged sample keeps its every bit
        return SampledState(
            recent=slots.extend(recent, spec, chunk, self.sinks, by_rank=False),
            k=jnp.where(settled[..., None], state.k, _pick(k, best)),
            v=jnp.where(settled[..., None], state.v, _pick(v, best)),
            positions=jnp.where(
                settled, state.positions, jnp.take_along_axis(positions, best, axis=2)
            ),
            middle=state.middle + left,
            key=state.key,
        )

    def kept(self, spec: Spec, state: SampledState) -> Kept:
        recent = slots.kept(state.recent)
        return Kept(
            jnp.concatenate([recent.positions, state.positions], axis=2),
            jnp.concatenate([recent.log_weight, self._log_weight(state)], axis=2),
        )

    def _held(self, state: SampledState) -> jax.Array:
        held = jnp.arange(self.sample)[None, None] < state.middle[:, None, None]
        return jnp.broadcast_to(held, state.positions.shape)

    def _log_weight(self, state: SampledState) -> jax.Array:
        times = jnp.maximum(state.middle.astype(jnp.float32) / self.sample, np.float32(1))
        return jnp.where(self._held(state), jnp.log(times)[:, None, None], -jnp.inf)


def _pick(x: jax.Array, best: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, best[..., None], axis=2)


def priority(positions: jax.Array, key: jax.Array) -> jax.Array:
    """The draw of each position [B,K,S] under key [B,K,2]; one-to-one, so there are no ties."""
    return _mix(_mix(positions + key[:, :, :1]) ^ key[:, :, 1:])


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))
