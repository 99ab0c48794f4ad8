"""Divide memory into weights, sequences and prefixes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxkv.contract import Policy
from jaxkv.defaults import GROWING_LEN, MAX_BATCH, MEMORY_SHARE, PREFIX_MEMORY
from jaxkv.errors import UserError, check_int
from jaxkv.serve.engine import pool
from jaxkv.serve.engine.model import Model
from jaxkv.serve.engine.placement import placed, placed_pool
from jaxkv.serve.engine.prefill import init_prefill
from jaxkv.serve.engine.programs import PREFILLS, batch_sizes, carry_batch, empty_batch
from jaxkv.state import memory
from jaxkv.state.sharding import bytes_per_device


class ServingMemory(NamedTuple):
    """What an engine may allocate. limit: bytes of all; None where free memory is unknown.

    max_batch: sequences that decode together. prefixes: bytes for the prefix cache, 0 for none.
    """

    limit: int | None
    max_batch: int
    prefixes: int


class EngineBytes(NamedTuple):
    """Bytes of the weights, all prefills, one sequence of the decode batch, and one prefix."""

    weights: int
    prefills: int
    sequence: int
    prefix: int


def resolve_max_len(policies: Sequence[Policy], max_len: int | None) -> int | None:
    """The most tokens of a sequence; None for no limit, which only bounded caches allow."""
    if max_len is None and any(policy.grows for policy in policies):
        return GROWING_LEN
    if max_len is not None:
        check_int("max_len", max_len, maximum=2**31 - 1)
    return max_len


def sizes(model: Model, max_len: int | None, chunk: int, has_owners: bool = False) -> EngineBytes:
    """The sizes of a model's arrays; shapes of weights suffice.

    has_owners: the engine has `max_per_owner`.
    """
    max_len = resolve_max_len(model.policies, max_len)
    state = jax.eval_shape(lambda: init_prefill(model, max_len, jax.numpy.uint32(0)))
    batch = jax.eval_shape(lambda: carry_batch(model, empty_batch(model, 1, max_len)))
    layout = pool.prefix_layout(model.policies, state.states, chunk)
    prefix = pool.shapes_of_prefix(layout, model.policies, state.states)
    prefills = (PREFILLS + has_owners) * bytes_per_device(placed(model, state))
    return EngineBytes(
        bytes_per_device(model.weights),
        prefills,
        bytes_per_device(placed(model, batch)),
        bytes_per_device(placed_pool(model, layout, prefix)),
    )


def plan_memory(
    sizes: EngineBytes,
    requested: int | None = None,
    max_batch: int | None = None,
    prefixes: int | None = None,
    free: int | None = None,
    host_prefixes: int = 0,
    fixed_batch: bool = True,
) -> ServingMemory:
    """Divide `requested` bytes, or MEMORY_SHARE of `free`: weights, sequences, then prefixes.

    max_batch, prefixes: fix these parts. By default up to MAX_BATCH sequences decode together, and
    prefixes get the rest, but at most PREFIX_MEMORY if `requested` is None. host_prefixes: bytes
    for prefixes on the host, where host and device share their memory. fixed_batch: as of the
    engine; without it, batches of all sizes are in memory.
    Raises UserError, with the bytes that are needed, if the parts do not fit, if more is given than
    is free, or if the prefixes' memory holds none.
    """
    show = memory.show
    if requested is not None and free is not None and requested > free:
        raise UserError(
            f"--memory must be at most what is free ({show(free)}), got {show(requested)}; "
            "give less, or leave it out"
        )
    if prefixes is not None and 0 < prefixes < sizes.prefix:
        raise UserError(
            f"--prefix-memory must hold one prefix ({show(sizes.prefix)}), got {show(prefixes)}; "
            "give more, or 0 for no prefix cache"
        )
    limit = requested if requested is not None or free is None else int(free * MEMORY_SHARE)
    if limit is None:
        chosen = PREFIX_MEMORY if prefixes is None else prefixes
        return ServingMemory(None, max_batch or MAX_BATCH, chosen)
    fixed = sizes.weights + sizes.prefills + (prefixes or 0) + host_prefixes

    def sequences(batch: int) -> int:
        return sizes.sequence * (batch if fixed_batch else sum(batch_sizes(batch)))

    minimum = fixed + sequences(max_batch or 1)
    if minimum > limit:
        source = "memory" if requested is not None else f"{MEMORY_SHARE:.0%} of the free memory"
        batch = max_batch or 1
        counts = " and ".join(map(str, (batch,) if fixed_batch else batch_sizes(batch)))
        parts = _parts(sizes, counts, sequences(batch), prefixes, host_prefixes)
        fits_fixed = not fixed_batch and fixed + batch * sizes.sequence <= limit
        enough = -(-minimum // 2**20)  # MiB
        remedy = f"--memory {enough}MiB or " if free is None or enough * 2**20 <= free else ""
        raise UserError(
            f"{source} must hold {', '.join(parts)}, got {show(limit)}; give {remedy}"
            f"{_remedy(max_batch, prefixes, host_prefixes, fits_fixed)}"
        )
    fitting = [n for n in range(1, MAX_BATCH + 1) if fixed + sequences(n) <= limit]
    batch = max_batch or max(fitting)
    if prefixes is not None:
        return ServingMemory(limit, batch, prefixes)
    remaining = limit - fixed - sequences(batch)
    remaining = remaining if requested is not None else min(remaining, PREFIX_MEMORY)
    return ServingMemory(limit, batch, remaining if remaining >= sizes.prefix else 0)


def _parts(
    sizes: EngineBytes, batches: str, sequences: int, prefixes: int | None, host_prefixes: int
) -> list[str]:
    """What memory must hold, each part with its bytes. sequences: bytes of the decode batches."""
    show = memory.show
    parts = [
        f"weights ({show(sizes.weights)})",
        f"{batches} sequence{'s' * (batches != '1')} ({show(sizes.prefills + sequences)})",
    ]
    parts += [f"prefixes ({show(prefixes)})"] if prefixes else []
    return parts + ([f"prefixes on the host ({show(host_prefixes)})"] if host_prefixes else [])


def _remedy(batch: int | None, prefixes: int | None, host_prefixes: int, fits_fixed: bool) -> str:
    """The end of a message: which flags to lower. fits_fixed: whether a fixed batch would fit."""
    names = {"max-batch": batch, "prefix-memory": prefixes, "prefix-host-memory": host_prefixes}
    smaller = [f"a smaller --{name}" for name, value in names.items() if value]
    smaller_policy = "a smaller policy (under growing caches, also a smaller --max-len)"
    return " or ".join((["--fixed-batch"] if fits_fixed else []) + smaller) or smaller_policy
