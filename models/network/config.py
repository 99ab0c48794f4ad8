"""The description of a decoder: one frozen dataclass, from which every member follows."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.rotary import Rotary

SINK_LOGITS = ("none", "zero", "learned")


@dataclass(frozen=True)
class Config:
    """A decoder of the Llama family; equal descriptions hash alike.

    windows: the model's own sliding window of each layer, None for full attention; the window
    includes the query's own key. dtype: the dtype of the published weights. sink_logit: the extra
    term in every softmax sum: none, exp(0), or exp of a learned logit per head.
    """

    family: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    encoding: Rotary
    context: int
    dtype: str
    bos: int | None
    eos: tuple[int, ...]
    sink_logit: str = "none"

    @property
    def learned_sinks(self) -> bool:
        """Whether every head has its own learned sink logit."""
        return self.sink_logit == "learned"

    @property
    def untied_head(self) -> bool:
        """Whether the output head is a matrix of its own."""
        return not self.tied
