"""A prompt that is thinned once, when it is complete: what one-shot methods have in common.

Until `seal` everything is kept and attention is exact. Then the first tokens and the last stay as
they are, those between leave a sample of themselves, and what is generated is kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import exact, slots
from jaxkv import sample as drawn
from jaxkv.attention import merge
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.sample import Sample
from jaxkv.slots import Slots
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

MOST = 2**30  # slots
# The tokens between [B,K,S,*], how many of them there are -> some of them, with log weights.
Choose = Callable[[Sample, Int32[Array, " B"]], tuple[Sample, Float32[Array, "B K C"]]]


class ThinnedState(NamedTuple):
    """exact: every token, and once the prompt is sealed its first and last and what followed.

    sample, log_weight: no slots until then. queries: the last W of the prompt, turned, for methods
    that ask them; asked: where they stand. Both are gone once it is sealed.
    """

    exact: Slots
    sample: Sample
    log_weight: Float32[Array, "B K C"]
    queries: Float[Array, "B K W G H"]
    asked: UInt32[Array, "B W"]
    key: UInt32[Array, "B K 2"]


AXES = ThinnedState(
    slots.AXES, drawn.AXES, ("B", "K", "C"), ("B", "K", "W", "G", "H"), ("B", "W"), ("B", "K", "2")
)
SHARED = (*(f"exact.{name}" for name in slots.SHARED), "asked")
APPENDS = tuple(f"exact.{name}" for name in slots.APPENDS)


class Ends(NamedTuple):
    """The first and the last tokens of a prompt that stay; the others are thinned in groups of
    `multiple`, and the last of them that make no group stay too."""

    sinks: int
    window: int
    multiple: int = 1

    @property
    def most(self) -> int:
        return self.sinks + self.window + self.multiple - 1


def check(ends: Ends, start: int, good: tuple[int, int] = (32, 32)) -> None:
    """Raise UserError for ends that cannot be, or first slots; good: ends that would do."""
    sinks, window, _ = ends
    if sinks < 0 or window < 1 or start < 1 or max(sinks, window, start) > MOST:
        raise UserError(
            f"sinks must be 0 or more, window and start at least 1, all {MOST} at most, got "
            f"{sinks}, {window} and {start}; try sinks={good[0]},window={good[1]},start=512"
        )


def check_rounds(rounds: int) -> None:
    """Raise UserError where a prompt is not halved, or so often that little would be left."""
    if not 1 <= rounds <= 10:
        raise UserError(f"rounds must be from 1 to 10, got {rounds}; try rounds=2")


def init(spec: Spec, rows: int, key: jax.Array, start: int, queries: int = 0) -> ThinnedState:
    """queries: how many of the last to keep."""
    if queries and spec.group is None:
        raise UserError(
            "this policy keeps queries, so it must know how many heads share a kv head; give "
            "Spec(group=...)"
        )
    asked = rows, spec.kv_heads, queries, spec.group or 0, spec.head_dim
    return ThinnedState(
        slots.init(spec, rows, start),
        drawn.init(spec, rows, 0),
        jnp.zeros((rows, spec.kv_heads, 0), jnp.float32),
        jnp.zeros(asked, jnp.float32),
        jnp.zeros((rows, queries), jnp.uint32),
        drawn.keys(key, spec, rows),
    )


def is_sealed(state: ThinnedState) -> bool:
    return state.log_weight.shape[2] > 0


def reserve(spec: Spec, state: ThinnedState, tokens: int, ends: Ends) -> ThinnedState:
    """Room for `tokens`, or once the prompt is sealed for so many behind it."""
    tokens += ends.most if is_sealed(state) else 0
    return state._replace(exact=exact.reserve(state.exact, tokens, MOST))


def attend(spec: Spec, state: ThinnedState, chunk: Chunk) -> Partial:
    return _with_sample(spec, state, chunk, exact.attend(spec, state.exact, chunk))


def extend(spec: Spec, state: ThinnedState, chunk: Chunk) -> ThinnedState:
    state = _ask(spec, state, chunk)
    return state._replace(exact=exact.extend(spec, state.exact, chunk))


def _ask(spec: Spec, state: ThinnedState, chunk: Chunk) -> ThinnedState:
    """The last queries, those of the chunk among them."""
    rows, kv_heads, most, group, head_dim = state.queries.shape
    if not most:
        return state
    q = spec.encoding.rotate(chunk.q.astype(jnp.float32), chunk.positions)
    q = q.reshape(rows, -1, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    queries = jnp.concatenate([state.queries, q], axis=2)
    asked = jnp.concatenate([state.asked, chunk.positions], axis=1)
    there = jnp.concatenate([jnp.ones((rows, most), bool), chunk.valid], axis=1)
    order = jnp.argsort(~there, axis=1, stable=True)  # those that are there first
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)[:, None]
    last = jnp.take_along_axis(order, new + jnp.arange(most)[None], axis=1)
    return state._replace(
        queries=jnp.take_along_axis(queries, last[:, None, :, None, None], axis=2),
        asked=jnp.take_along_axis(asked, last, axis=1),
    )


def decode(spec: Spec, state: ThinnedState, chunk: Chunk) -> tuple[Partial, ThinnedState]:
    partial, held = exact.decode(spec, state.exact, chunk)
    after = _ask(spec, state, chunk)._replace(exact=held)
    return _with_sample(spec, state, chunk, partial), after


def _with_sample(spec: Spec, state: ThinnedState, chunk: Chunk, partial: Partial) -> Partial:
    if not is_sealed(state):
        return partial
    asked = chunk.valid[:, None, :, None]
    bias = jnp.where(asked, state.log_weight[:, :, None], -jnp.inf)
    return merge(partial, drawn.attend(spec, chunk.q, chunk.positions, state.sample, bias))


def kept(spec: Spec, state: ThinnedState) -> Kept:
    held = slots.kept(state.exact)
    return Kept(
        jnp.concatenate([held.positions, state.sample.positions], axis=2),
        jnp.concatenate([held.log_weight, state.log_weight], axis=2),
    )


def seal(spec: Spec, state: ThinnedState, ends: Ends, choose: Choose) -> ThinnedState:
    """The prompt is complete: what lies between its ends becomes what `choose` makes of it."""
    prompt = state.exact
    rows, kv_heads, size, _ = prompt.k.shape
    thin = jnp.maximum(0, jnp.minimum(prompt.count, size) - ends.sinks - ends.window)
    thin -= thin % ends.multiple
    between = max(0, size - ends.sinks - ends.window)
    if between:
        here = slice(ends.sinks, ends.sinks + between)
        positions = jnp.broadcast_to(prompt.positions[:, None, here], (rows, kv_heads, between))
        chosen, weight = choose(Sample(prompt.k[:, :, here], prompt.v[:, :, here], positions), thin)
    else:  # one empty slot, which says that the prompt is sealed
        chosen = drawn.init(spec, rows, 1)
        weight = jnp.full((rows, kv_heads, 1), -jnp.inf, jnp.float32)
    slot = jnp.arange(min(ends.most, size))[None]
    source = jnp.where(slot < ends.sinks, slot, slot + thin[:, None])
    source = jnp.minimum(source, size - 1)
    ends_of = Slots(
        *(jnp.take_along_axis(leaf, source[:, None, :, None], axis=2) for leaf in prompt[:2]),
        jnp.take_along_axis(prompt.positions, source, axis=1),
        # A row that lost tokens says so ever after.
        jnp.where(prompt.count > size, slots.OVERFULL, prompt.count - thin),
    )
    return state._replace(
        exact=ends_of, sample=chosen, log_weight=weight,
        queries=state.queries[:, :, :0], asked=state.asked[:, :0],
    )  # fmt: skip


def shorten(
    chosen: Sample, count: Int32[Array, " B"], weight: float | Array
) -> tuple[Sample, Float32[Array, "B K C"]]:
    """A sample whose first `count` slots hold a token, each with this log weight."""
    there = jnp.arange(chosen.positions.shape[2])[None, None] < count[:, None, None]
    return chosen, jnp.where(there, jnp.float32(weight), -jnp.inf) + jnp.zeros(
        chosen.positions.shape, jnp.float32
    )


def cut(tokens: Sample, size: int) -> Sample:
    """The first `size` slots, empty ones behind them where there are fewer."""
    more = max(0, size - tokens.positions.shape[2])
    pad = lambda leaf: jnp.pad(leaf, [(0, 0), (0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 3))  # noqa: E731
    return Sample(*(pad(leaf)[:, :, :size] for leaf in tokens))


def attention_of_last(spec: Spec, state: ThinnedState) -> Float32[Array, "B K G S"]:
    """The attention that each token gets from the last queries of the prompt, in sum over them."""
    prompt = state.exact
    kv_heads, most = state.queries.shape[1:3]
    logits = jnp.einsum(
        "bkwgh,bksh->bkgws", state.queries, prompt.k.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ) * jnp.float32(spec.scale)  # fmt: skip
    if spec.softcap is not None:
        logits = jnp.float32(spec.softcap) * jnp.tanh(logits / jnp.float32(spec.softcap))
    penalty = spec.encoding.bias(state.asked, prompt.positions, kv_heads)
    logits = logits if penalty is None else logits + penalty
    # The j-th of the last queries is that of token count - W + j, and sees those up to its own.
    number = prompt.count[:, None] - most + jnp.arange(most)[None]
    slot = jnp.arange(prompt.positions.shape[1])
    seen = slot[None, None] <= number[:, :, None]
    seen = seen[:, None, None]
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    shares = weights / jnp.where(total == 0, 1.0, total)
    return jnp.sum(shares, axis=3)
