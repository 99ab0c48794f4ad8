"""Forms for XLA:GPU, chosen by the default backend. Each says what was measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.typing import Array, Bool, Int32


def writes_by_scatter(old: Array, width: int) -> bool:
    """Whether `scatter_slot` writes one token of every sequence."""
    return width == 1 and old.shape[0] > 1 and jax.default_backend() == "gpu"


def carries_shared_once() -> bool:
    """Whether decoding carries an array that layers share once, and not once per layer.

    XLA then updates it once too. On an H100 a layer of a decode step has 3 kernels less under
    `full` and `streaming` (compiled, evals/results/compiled.json); on a CPU no time changes. A TPU
    keeps one per layer: with 16 layers, XLA:TPU otherwise copies each cache to fast memory before
    it reads it (tests/lab/test_tpu.py).
    """
    return jax.default_backend() != "tpu"


def scores_twice() -> bool:
    """Whether the two queries of a token, for sinks and for the ring, are scored in one product.

    Each is then multiplied with all slots, so twice as many products are computed, from the same
    bytes. On an H100 a layer of a decode step has 2 to 3 kernels less under `streaming` (compiled,
    evals/results/compiled.json).
    """
    return jax.default_backend() == "gpu"


def scatter_slot(
    old: Array, fresh: Array, slot: Int32[Array, " B"], hit: Bool[Array, "B 1"]
) -> Array:
    """old [B,K,S,H] or [B,S] with fresh [B,K,1,H] or [B,1] in one slot of each sequence, where hit.

    A form that reads the old slot first is fused with its write, so XLA:GPU copies the whole cache.
    Measured on an H200, without a record: this form takes a sixth off a decode step of 32 sequences
    (SmolLM2-135M, 256 slots).
    """
    size = old.shape[-2] if old.ndim == 4 else old.shape[-1]
    sequence, slot = jnp.arange(old.shape[0]), jnp.where(hit[:, 0], slot, size)
    fresh = fresh.astype(old.dtype)
    if old.ndim == 2:
        return old.at[sequence, slot].set(fresh[:, 0], mode="drop", unique_indices=True)
    return old.at[sequence, :, slot].set(fresh[:, :, 0], mode="drop", unique_indices=True)
