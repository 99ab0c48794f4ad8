"""In how many hash tables each place shares the bucket of a query, on any platform.

MagicPIG (2410.16179) samples the keys of the places that share enough buckets. To compare the code
of the query with packed codes of all keys would read more bytes: with L = 150 tables of K = 10
bits, codes have L K / 8 = 188 bytes per key, where exact attention reads 256 with a head dim of 64.
A query head reads L / 2^K = 0.15 entries of tables per key, of 2 or 4 bytes each. The counts have
4 bytes per key and query head.
"""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array

from jaxkv.pallas_kernels.bucket_counts import reference

CountKernel = Literal["xla", "pallas_gpu"]


def bucket_counts(
    entries: Array,
    first: Array,
    codes: Array,
    places: int,
    *,
    implementation: CountKernel | None = None,
) -> Array:
    """Counts [B,N,P] int32: the tables in which the bucket of a query's code has the place.

    entries [B,K,L,E,W]: place + 1, or 0 for none, in blocks of W. first [B,K,L,C] int32: the first
    block of each code, and the end of the last. codes [B,N,L] int32, of N query heads; heads
    n*G .. n*G+G-1 share KV head n. places: P.

    implementation: None chooses for the platform. A name raises ValueError where it is unsupported.
    """
    if implementation is None:
        implementation = "pallas_gpu" if has_kernel() else "xla"
    if implementation == "xla":
        return reference.count(entries, first, codes, places)
    if implementation == "pallas_gpu" and has_kernel():
        from jaxkv.pallas_kernels.bucket_counts import gpu  # Pallas takes a quarter second

        return gpu.count(entries, first, codes, places)
    raise ValueError(
        "bucket counts are computed by xla and, on NVIDIA GPUs from capability 8.0, by "
        f"pallas_gpu, got {implementation!r}; leave it out to choose by platform"
    )


def has_kernel() -> bool:
    """Whether a kernel of the default backend computes them: on NVIDIA GPUs from capability 8.0."""
    if jax.default_backend() != "gpu":
        return False
    from jaxkv.pallas_kernels.bucket_counts import gpu

    return gpu.is_supported()
