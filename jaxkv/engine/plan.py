"""Divide memory into weights, sequences and prefixes, before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxkv.engine import pool
from jaxkv.engine.handle import resolve_max_len
from jaxkv.engine.model import Model
from jaxkv.engine.programs import empty_batch, init_prefill
from jaxkv.errors import UserError
from jaxkv.state import memory
from jaxkv.state.batch import nbytes

MAX_BATCH = 16  # sequences, where neither they nor memory set fewer
PREFIX_MEMORY = 2**29  # bytes for prefixes, where neither they nor memory are given
SHARE = 0.9  # of the free memory, where none is given


class MemoryPlan(NamedTuple):
    """What an engine may allocate. limit: bytes of all; None where free memory is unknown.

    max_batch: sequences that decode together. prefixes: bytes for the prefix cache, 0 for none.
    """

    limit: int | None
    max_batch: int
    prefixes: int


class Sizes(NamedTuple):
    """Bytes of the weights, a prefill, one sequence of the decode batch, and one prefix."""

    weights: int
    prefill: int
    sequence: int
    prefix: int


def sizes(model: Model, max_len: int | None, chunk: int) -> Sizes:
    """The sizes of a model's arrays; shapes of weights suffice."""
    max_len = resolve_max_len(model.policies, max_len)
    state = jax.eval_shape(lambda: init_prefill(model, max_len, jax.numpy.uint32(0)))
    batch = jax.eval_shape(lambda: empty_batch(model, 1, max_len))
    layout = pool.prefix_layout(model.policies, state.states, chunk)
    prefix = pool.bytes_per_prefix(layout, model.policies, state.states)
    return Sizes(nbytes(model.weights), nbytes(state), nbytes(batch), prefix)


def plan_memory(
    sizes: Sizes,
    given: int | None = None,
    max_batch: int | None = None,
    prefixes: int | None = None,
    free: int | None = None,
) -> MemoryPlan:
    """Divide `given` bytes, or SHARE of the `free` ones: weights, then sequences, then prefixes.

    max_batch, prefixes: fix these parts. By default there are up to MAX_BATCH sequences; prefixes
    take what is left, but at most PREFIX_MEMORY if no memory is given.
    Raises UserError, with the bytes that are needed, if the parts do not fit.
    """
    limit = given if given is not None or free is None else int(free * SHARE)
    if limit is None:
        chosen = PREFIX_MEMORY if prefixes is None else prefixes
        return MemoryPlan(None, max_batch or MAX_BATCH, chosen)
    fixed = sizes.weights + sizes.prefill + (prefixes or 0)
    least = fixed + (max_batch or 1) * sizes.sequence
    if least > limit:
        raise UserError(_too_small(sizes, limit, least, max_batch, prefixes, given is not None))
    batch = max_batch or min(MAX_BATCH, (limit - fixed) // sizes.sequence)
    if prefixes is not None:
        return MemoryPlan(limit, batch, prefixes)
    left = limit - fixed - batch * sizes.sequence
    left = left if given is not None else min(left, PREFIX_MEMORY)
    return MemoryPlan(limit, batch, left if left >= sizes.prefix else 0)


def _too_small(
    sizes: Sizes, limit: int, least: int, batch: int | None, prefixes: int | None, given: bool
) -> str:
    show, count = memory.show, batch or 1
    parts = [
        f"weights ({show(sizes.weights)})",
        f"{count} sequence{'s' * (count > 1)} ({show(sizes.prefill + count * sizes.sequence)})",
        *([f"prefixes ({show(prefixes)})"] if prefixes else []),
    ]
    mebibytes = -(-least // 2**20)
    what = "memory must hold" if given else f"{SHARE:.0%} of the free memory must hold"
    fewer = ["a smaller --max-batch"] if batch else []
    fewer += ["a smaller --prefix-memory"] if prefixes else []
    advice = " or ".join([f"--memory {mebibytes}MiB", *(fewer or ["a smaller policy"])])
    return f"{what} {', '.join(parts)}, got {show(limit)}; give {advice}"
