"""In how many hash tables each place shares the bucket of a query."""

from jaxkv.pallas_kernels.bucket_counts.api import bucket_counts, has_kernel

__all__ = ["bucket_counts", "has_kernel"]
