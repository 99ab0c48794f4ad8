"""A dense cache that grows: the storage of `full`, and of a prompt until it is compressed.

More tokens than slots raise UserError. Inside a compiled call nothing can be raised, so the
sequence outputs NaN from then on: lost tokens cannot go unnoticed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import ring
from jaxkv.cache.ring import OVERFULL, Ring
from jaxkv.contract import Chunk, Leaf, Partial, Spec
from jaxkv.errors import UserError

LEAVES = Ring(
    k=Leaf("B K S H", append_only=True),
    v=Leaf("B K S H", append_only=True),
    positions=Leaf("B S", shared=True, append_only=True),
    count=Leaf("B", shared=True),
)
MAX_SLOTS = 2**30


def check(sinks: int, window: int, start: int, example: str) -> None:
    """Raise UserError for impossible sinks, window or first slots; example: ones that would do."""
    if sinks < 0 or window < 1 or start < 1 or max(sinks, window, start) > MAX_SLOTS:
        raise UserError(
            f"sinks must be 0 or more, window and start at least 1, all {MAX_SLOTS} at most, got "
            f"{sinks}, {window} and {start}; try {example}"
        )


def slots_for(tokens: int, start: int, most: int) -> int:
    """The number of slots for `tokens` tokens, doubled from `start` as often as needed.

    Raises UserError for more tokens than `most`.
    """
    if tokens <= start:
        return start
    if tokens > most:
        raise UserError(
            f"a growing cache holds at most {most} tokens and {tokens} are needed; raise "
            "max where the policy has one, or use a policy of constant memory such as "
            "streaming:sinks=4,window=252"
        )
    size = start
    while size < tokens:
        size = min(2 * size, most)
    return size


def reserve(state: Ring, tokens: int, most: int) -> Ring:
    """Grow the cache to `tokens` slots in total, by doubling. Raises UserError above `most`."""
    size = state.positions.shape[1]
    wanted = slots_for(tokens, size, most)
    return state if wanted == size else ring.grow(state, wanted)


def update(spec: Spec, state: Ring, chunk: Chunk) -> tuple[Partial, Ring]:
    """Attend to all tokens so far and to the chunk; append the chunk."""
    _check_room(state, chunk)
    sinks = _exact(state)
    if chunk.valid.shape[1] == 1:
        partial, after = ring.decode(spec, state, chunk, sinks, cache_relative=False, evict=False)
    else:
        partial = ring.attend(spec, state, chunk, sinks, window=None, cache_relative=False)
        after = append(spec, state, chunk)
    return refuse_overfull(partial, after), after


def append(spec: Spec, state: Ring, chunk: Chunk) -> Ring:
    """The state with the chunk."""
    _check_room(state, chunk)
    return ring.write(spec, state, chunk, _exact(state), cache_relative=False, evict=False)


def _exact(state: Ring) -> int:
    """The number of first tokens that are also stored in full precision."""
    return 0 if state.sinks is None else state.sinks.k.shape[2]


def refuse_overfull(partial: Partial, after: Ring) -> Partial:
    """NaN for sequences that got more tokens than they have slots."""
    over = after.count > after.positions.shape[1]
    return partial._replace(out=jnp.where(over[:, None, None, None], jnp.nan, partial.out))


def _check_room(state: Ring, chunk: Chunk) -> None:
    """Raise UserError for tokens that do not fit, where arrays have values to look at."""
    if isinstance(state.count, jax.core.Tracer) or isinstance(chunk.valid, jax.core.Tracer):
        return
    # In numpy: inside a trace JAX would stage the sum, whatever the arrays are.
    written, new = np.asarray(state.count, np.int64), np.asarray(chunk.valid).sum(axis=1)
    most, size = int((written + new).max()), state.k.shape[2]
    if most >= OVERFULL:
        raise UserError(
            f"a sequence got more tokens than its {size} slots in a compiled call, and they are "
            "lost; begin again with policy.init, and reserve before each call"
        )
    if most > size:
        raise UserError(
            f"a sequence has {size} slots and {most} are needed; make room first: "
            f"state = policy.reserve(spec, state, {most})"
        )
