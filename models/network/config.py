"""The description of a decoder: one frozen dataclass, from which every member follows."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Literal

from jaxkv.rotary import Encoding, Rotary

SINK_LOGITS = ("none", "zero", "learned")
OTHERS = ("sink_logit", "picture_ids")  # fields with a default that are no switches


@dataclass(frozen=True)
class Config:
    """A decoder; equal descriptions hash alike. The defaults of its switches are those of Llama.

    Sizes: vocab, width (D), layers, heads (N), kv_heads (K), head_dim (H), mlp (F), context.
    windows: the model's own sliding window of each layer, None for full attention; the window
    includes the query's own key. dtype: the dtype of the published weights. sink_logit: the extra
    term in every softmax sum: none, exp(0), or exp of a learned logit per head. picture_ids: tokens
    that stand for pictures, which the decoder alone cannot read; empty for a model of text.

    encoding: the positions of all layers; `encodings` replaces it, one per layer.
    norm: root mean square times w or 1 + w, or LayerNorm. norm_bias: LayerNorm adds a bias.
    norm_place: before attention and MLP, after them, or both.
    qk_norm: none; of each head; or of all heads together.
    gated: the MLP is down(activation(gate) x up), otherwise down(activation(up)).
    clamp: the largest gate, and the largest absolute value of what it gates, which is raised by 1.
    experts: how many MLPs, of width expert_mlp, a router chooses from, except in dense_layers; 0
    for none. A token has experts_per_token of them, whose shares add up to 1 if
    normalised_experts. mlp_bias is also of the router.
    parallel: attention and MLP both read the layer's input: `shared` by one norm, `separate` by
    one each.
    clip_qkv: the largest absolute value of queries, keys and values. query_growth: (b, length), of
    queries that grow by 1 + b log(1 + floor(position / length)).
    scale: of attention logits; None is H^-0.5. softcap, logit_softcap: c x tanh(x / c) of attention
    logits and of the model's logits. embedding_scale, residual_scale, logit_scale: factors.
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
    qk_norm: Literal["none", "head", "whole"]
    windows: tuple[int | None, ...]
    encoding: Encoding
    context: int
    dtype: str
    bos: int | None
    eos: tuple[int, ...]
    sink_logit: str = "none"
    picture_ids: tuple[int, ...] = ()
    encodings: tuple[Encoding, ...] | None = None
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    norm_bias: bool = False
    norm_place: Literal["before", "after", "both"] = "before"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    clamp: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    normalised_experts: bool = True
    dense_layers: tuple[int, ...] = ()
    parallel: Literal["none", "shared", "separate"] = "none"
    clip_qkv: float | None = None
    query_growth: tuple[float, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def llama_form(self) -> bool:
        """Whether every switch is as in Llama, Mistral, Qwen2 or Qwen3."""
        switches = (f for f in fields(self) if f.default is not MISSING and f.name not in OTHERS)
        defaults = all(getattr(self, switch.name) == switch.default for switch in switches)
        rotated = isinstance(self.encoding, Rotary) and self.encoding.head_dim is None
        return defaults and rotated and self.qk_norm != "whole"

    @property
    def learned_sinks(self) -> bool:
        """Whether every head has its own learned sink logit."""
        return self.sink_logit == "learned"

    @property
    def untied_head(self) -> bool:
        """Whether the output head is a matrix of its own."""
        return not self.tied

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.qk_norm == "head"

    @property
    def whole_norms(self) -> bool:
        """Whether all heads of queries, and of keys, are normalised together."""
        return self.qk_norm == "whole"

    @property
    def mlp_norms(self) -> bool:
        """Whether a norm of its own precedes the MLP."""
        return self.norms_before and self.parallel != "shared"

    @property
    def dense(self) -> bool:
        """Whether a layer, of `of_layer`, has one MLP."""
        return not self.experts

    @property
    def norms_before(self) -> bool:
        """Whether a norm precedes attention and MLP."""
        return self.norm_place != "after"

    @property
    def norms_after(self) -> bool:
        """Whether a norm follows attention and MLP."""
        return self.norm_place != "before"


@cache
def of_layer(config: Config, number: int) -> Config:
    """The description of one layer, equal for equal layers: their programs are shared.

    The layer's window is not part of it: its policy, or its attention without a cache, has that.
    """
    encoding = config.encoding if config.encodings is None else config.encodings[number]
    experts = 0 if number in config.dense_layers else config.experts
    return replace(
        config, encoding=encoding, encodings=None, windows=(), experts=experts, dense_layers=()
    )
