"""Attention over some rows of a cache, each with a weight (MagicPIG, Chen et al. 2024)."""

from jaxkv.pallas_kernels.sampled_attention.api import Angles, Attended, How, sampled_attention

__all__ = ["Angles", "Attended", "How", "sampled_attention"]
