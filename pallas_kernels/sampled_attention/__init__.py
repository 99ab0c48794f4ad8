"""Attention over sampled slots of a cache, each with a weight (MagicPIG, Chen et al. 2024)."""

from jaxkv.pallas_kernels.online_softmax import AttentionOutput
from jaxkv.pallas_kernels.sampled_attention.api import (
    Angles,
    LogitSettings,
    sampled_attention,
)

__all__ = ["Angles", "AttentionOutput", "LogitSettings", "sampled_attention"]
