"""Attention of a chunk of queries to several sets of keys, in one kernel (FlashAttention)."""

from jaxkv.pallas_kernels.flash_attention.api import flash_attention, refusal
from jaxkv.pallas_kernels.flash_attention.reference import KeySet

__all__ = ["KeySet", "flash_attention", "refusal"]
