"""Forms for GPUs, and for TPUs where they are alike, chosen by the default backend.

Each says what was measured.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxkv.contract import Partial, Spec
from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels.bucket_counts import has_kernel
from jaxkv.pallas_kernels.flash_attention import refusal
from jaxkv.platform.cpu import always_after
from jaxkv.rotary import Alibi
from jaxkv.rows import Int8Rows, Rows
from jaxkv.typing import Array, Bool, Float, Int32

Tree = TypeVar("Tree")


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


def reads_by_flash(spec: Spec, q: Float[Array, "B T N H"], k: Rows) -> bool:
    """Whether tokens read the rows of a cache and themselves in one kernel, `flash_attention`.

    On an H100 a layer of a prefill chunk then has half as many kernels, and neither there nor on a
    v5e do logits lie in memory (compiled, evals/results/compiled.json). No GPU or TPU has run it. A
    TPU reads a single token by XLA's form: its kernel would read each key once per query head.
    """
    if isinstance(k, Int8Rows) or q.dtype != k.dtype:
        return False
    if q.shape[1] == 1 and jax.default_backend() == "tpu":
        return False
    return not plain_attention(spec, k.dtype)


def plain_attention(spec: Spec, dtype: jnp.dtype) -> str | None:
    """Why chunks are read by XLA's plain form; None if a kernel reads rows of this dtype."""
    if isinstance(spec.encoding, Alibi):
        return "the encoding is ALiBi"
    return refusal(spec.head_dim, jnp.dtype(dtype))


def write_after(read: Partial | None, written: Tree) -> Tree:
    """The same arrays [B,...], to be written only after the cache was read; None: in any order.

    Otherwise XLA:GPU may write first, and copies the whole cache before it so that the kernel can
    read the old one. It drops an optimization barrier whose other output is not used.
    """
    if read is None or jax.default_backend() != "gpu":
        return written

    def depend(leaf: Array) -> Array:
        always = always_after(read.lse).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(always, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(depend, written)


def scatters_per_head() -> bool:
    """Whether `scatter_per_head` writes a token to a sample."""
    return jax.default_backend() == "gpu"


def finds_at_once(tables: Array) -> bool:
    """Whether the keys in the buckets of all query heads are found in a few kernels, without loops.

    Loops that suit a CPU take a GPU many launches per query head, and the host decides their end.
    GPUs without the kernel `bucket_counts` have these loops too, and so have tables in host memory.
    """
    return has_kernel() and not host_memory.on_host(tables)


def slots_compared() -> int:
    """The most slots that are ranked by comparing all pairs, in one kernel; more are sorted.

    A sort and its inverse are five kernels on a GPU (compiled, evals/results/compiled.json).
    """
    return 1024 if jax.default_backend() == "gpu" else 256


def scatter_per_head(
    old: Array, fresh: Array, slot: Int32[Array, "B K"], hit: Bool[Array, "B K"]
) -> Array:
    """`scatter_slot` to another slot of each KV head: old [B,K,S,*] with fresh [B,K,1,*]."""
    sequence, head = jnp.ogrid[: old.shape[0], : old.shape[1]]
    slot = jnp.where(hit, slot, old.shape[2])
    fresh = fresh[:, :, 0].astype(old.dtype)
    return old.at[sequence, head, slot].set(fresh, mode="drop", unique_indices=True)


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
